"""How to attend to a sequence that is split over ranks: each folder is a strategy that follows ``contract``.

Called through the spec that the request makes; a strategy calls kernels, never another strategy.
"""
