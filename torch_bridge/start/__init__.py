"""How JAX starts beside torch in all processes of a job, with which memory, options and kept programs."""
