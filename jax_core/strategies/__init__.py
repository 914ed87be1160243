"""How a sequence that is split over ranks is attended to: each folder is a strategy under ``contract``.

Called through the spec that the request makes; a strategy calls kernels, never another strategy.
"""
