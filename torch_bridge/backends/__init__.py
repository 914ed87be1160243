"""The ways into JAX, one for each kind of device: shared memory, torch-xla, TorchTPU."""
