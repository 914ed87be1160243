"""Which keys a query sees: layouts, static masks, mask functions and builders, dropout.

Arithmetic that every package above may call; ``layout``, ``static``, ``plan`` and ``balance`` need only NumPy.
"""
