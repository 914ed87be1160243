"""The ring fused into one Pallas kernel, for TPUs. Its modules load Pallas, so they are imported where they are first used."""
