"""Training loops: the loss and the gradients over a ring."""
