"""Sequences in shards: taking them, putting them together again, and sums over a ring."""
