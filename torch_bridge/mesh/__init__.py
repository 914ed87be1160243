"""Who shares a sequence: rings of processes, and the same as JAX's meshes."""
