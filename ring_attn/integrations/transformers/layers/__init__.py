"""What the layers of a transformers model call on a ring: attention, its masks, positions and padding."""
