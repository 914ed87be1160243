"""What the caller gives: checked, in one format, and in the core's names."""
