"""What a launch costs, for XLA's scheduler and whoever reads its cost analysis: counted over what is visible on average."""

from jax.experimental import pallas as pl

from jax_core.kernels.pallas.plan import Plan


def forward(plan: Plan, dtype) -> pl.CostEstimate:
    return _estimate(plan, dtype, products=(plan.dim, plan.value_dim), results=(plan.value_dim, 0))


def queries(plan: Plan, dtype) -> pl.CostEstimate:
    return _estimate(plan, dtype, products=(plan.dim, plan.value_dim, plan.dim), results=(plan.dim, 0))


def keys(plan: Plan, dtype, fused: bool) -> pl.CostEstimate:
    products = (plan.dim, plan.value_dim, plan.dim, plan.value_dim, *([plan.dim] if fused else []))
    return _estimate(plan, dtype, products, results=(plan.dim if fused else 0, plan.dim + plan.value_dim))


def bias(plan: Plan, dtype) -> pl.CostEstimate:
    return _estimate(plan, dtype, products=(plan.dim, plan.value_dim), results=(0, 0))


def _estimate(plan: Plan, dtype, products: tuple[int, ...], results: tuple[int, int]) -> pl.CostEstimate:
    """``products``: the inner or outer dims of the matrix products. ``results``: float32 numbers a query and a key."""
    q, k = plan.q.runs * plan.q.length, plan.k.runs * plan.k.length
    pairs = plan.batch * plan.heads * q * k * share(plan)
    dims = plan.dim + plan.value_dim
    rows = plan.batch * (plan.heads * q * (dims * dtype.itemsize + results[0] * 4) + plan.kv_heads * k * results[1] * 4)
    shards = plan.batch * plan.kv_heads * k * dims * dtype.itemsize * plan.group  # read once a query head, if all fit at once
    return pl.CostEstimate(flops=int(2 * pairs * sum(products)), transcendentals=int(pairs), bytes_accessed=int(rows + shards))


def share(plan: Plan) -> float:
    """Of all pairs, how many the static mask leaves, on average over the ring: which shards meet is known on the device alone."""
    mask, keys = plan.scores.mask, plan.k.runs * plan.k.length
    before = _least(mask.left, mask.chunk and mask.chunk // 2)
    after = 0 if mask.causal else mask.right
    whole = 0.5 if mask.causal else 1.0
    return whole if before is None or after is None else min(whole, (before + after + 1) / keys)


def _least(*sides: int | None) -> int | None:
    return min((side for side in sides if side is not None), default=None)
