"""The float64 oracle that every kernel and strategy is held to.

Called by tests, benchmarks and ``ring_attn.doctor`` alone; shares no code with what it checks.
"""
