"""How to attend to a sequence that is split over ranks: each folder is a strategy that follows ``contract``.

Called through the spec that the request makes; a strategy calls kernels and imports no other strategy:
Ulysses, which is around one, is given it in ``request.dispatch``.
"""
