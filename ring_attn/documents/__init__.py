"""Where the documents of a packed sequence begin: one definition for every way into a ring (docs/packed.md)."""
