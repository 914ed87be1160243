"""The bridge between torch and JAX: shared memory, processes, meshes and autograd. Importing it does not load JAX."""
