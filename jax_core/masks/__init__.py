"""Which keys a query sees: layouts, static masks, mask functions and builders, dropout.

Arithmetic that every room above may call; ``layout`` and ``static`` need the standard library only.
"""
