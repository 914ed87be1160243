"""A batch of transformers': what its entries mean, its shards, its loss and outputs."""
