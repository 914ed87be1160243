"""Generation of a context-parallel model: its cache over the ring, and transformers' ``generate`` with it."""
