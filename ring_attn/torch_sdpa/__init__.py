"""torch's ``scaled_dot_product_attention`` on a ring: as a function, and in place of torch's own in a model as it is."""
