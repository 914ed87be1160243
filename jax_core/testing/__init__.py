"""The float64 oracle that every kernel and strategy is held to.

Called by tests and benchmarks alone; shares no code with what it checks.
"""
