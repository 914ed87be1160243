"""torch models as they are: their attention routed to a ring."""
