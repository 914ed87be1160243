"""What strategies share of a rank's work: a pass over pairs of shards, their operands in full shape, and partial results."""
