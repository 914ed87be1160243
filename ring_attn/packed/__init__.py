"""Packed sequences: documents joined into one sequence, each of which sees only itself."""
