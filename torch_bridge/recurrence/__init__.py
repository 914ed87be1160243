"""Layers with a state as operations, beside attention: what follows from their options, and the entry."""
