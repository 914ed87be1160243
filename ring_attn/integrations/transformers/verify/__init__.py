"""``cp.verify``: a model on the ring against the same model in one process."""
