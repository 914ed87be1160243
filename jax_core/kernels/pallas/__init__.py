"""Kernels in Pallas for TPUs. Their modules load Pallas, so they are imported where they are first used."""
