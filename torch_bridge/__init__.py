"""Where torch and JAX meet: shared memory, processes, meshes and autograd. Importing it loads no JAX."""
