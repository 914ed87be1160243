"""Which keys a query sees: layouts, static masks, mask functions and builders, dropout.

Arithmetic that every package above may call; ``layout`` and ``static`` need only the standard library, ``plan``,
``areas`` and ``balance`` also NumPy.
"""
