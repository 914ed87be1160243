"""One call, checked: what was asked, which strategy and kernel do it, with which settings.

Called by the api and, for its ``make_spec``, by the torch bridge.
"""
