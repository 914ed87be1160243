"""``ring_attn.verify``: a training step, or a model, on the ring against the same in one process, by the result."""
