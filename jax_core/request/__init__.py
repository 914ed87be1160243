"""Checks one call: what was asked for, which strategy and kernel compute it, and with which settings.

Called by the api; the torch bridge also calls ``make_spec``.
"""
