"""Configurations that were measured: where they are kept, how one is found for a request, and the search for new ones.

``request.dispatch`` asks ``lookup``. ``python -m tools.tune`` searches (docs/contributing/tuning.md). All here knows kernels only
by their contract.
"""
