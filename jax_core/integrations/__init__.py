"""Ring attention inside layers of JAX's neural network libraries. Each module is imported by its own name."""
