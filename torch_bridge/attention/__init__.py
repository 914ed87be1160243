"""Attention as an operation of the bridge."""
