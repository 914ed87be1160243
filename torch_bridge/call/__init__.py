"""The way of a call: custom ops, autograd, and the programs that were made before."""
