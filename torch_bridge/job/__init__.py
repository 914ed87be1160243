"""The processes of a job: their meshes, how JAX starts in all of them, and what happens when one fails."""
