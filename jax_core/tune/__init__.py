"""Configurations that were measured: where they are kept, how one is found for a request, and the search for new ones.

``request.choice`` asks ``lookup``. ``python -m jax_core.tune`` searches (docs/contributing/tuning.md); it is in ``command``,
above the api. All else here knows kernels only by their contract.
"""
