"""What has to be known of a transformers model before it is sharded, and what is changed in it."""
