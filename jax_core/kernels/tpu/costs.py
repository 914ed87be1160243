"""What a launch costs, for XLA's scheduler and whoever reads its cost analysis: counted over what is visible on average."""

from jax.experimental import pallas as pl

from jax_core.kernels.blocks import BlockLayout
from jax_core.kernels.tpu.plan import Plan


def forward(plan: Plan, dtype) -> pl.CostEstimate:
    return _by_queries(plan, dtype, products=(plan.dim, plan.value_dim), read=0, written=plan.value_dim)


def queries(plan: Plan, dtype) -> pl.CostEstimate:
    return _by_queries(plan, dtype, products=(plan.dim, plan.value_dim, plan.dim), read=plan.value_dim, written=plan.dim)


def keys(plan: Plan, dtype, fused: bool) -> pl.CostEstimate:
    """Queries come with every visit, and in a fused sweep dQ comes and goes."""
    q, k, dims = _length(plan.q), _length(plan.k), plan.dim + plan.value_dim
    coming = plan.heads * plan.k.blocks * share(plan) * q * (dims * dtype.itemsize + (8 * plan.dim if fused else 0))
    staying = plan.kv_heads * k * dims * (dtype.itemsize + 4)
    products = (plan.dim, plan.value_dim, plan.dim, plan.value_dim, *([plan.dim] if fused else []))
    return _estimate(plan, products, plan.batch * (coming + staying))


def bias(plan: Plan, dtype) -> pl.CostEstimate:
    return _by_queries(plan, dtype, products=(plan.dim, plan.value_dim), read=plan.value_dim, written=0)


def _by_queries(plan: Plan, dtype, products: tuple[int, ...], read: int, written: int) -> pl.CostEstimate:
    """Keys and values come with every visit. ``read``, ``written``: numbers of a query beside the query, and of its result."""
    q, k, dims = _length(plan.q), _length(plan.k), plan.dim + plan.value_dim
    coming = plan.heads * plan.q.blocks * share(plan) * k * dims * dtype.itemsize
    staying = plan.heads * q * ((plan.dim + read) * dtype.itemsize + written * 4)
    return _estimate(plan, products, plan.batch * (coming + staying))


def _estimate(plan: Plan, products: tuple[int, ...], memory: float) -> pl.CostEstimate:
    """``products``: the inner or outer dims of the matrix products."""
    pairs = plan.batch * plan.heads * _length(plan.q) * _length(plan.k) * share(plan)
    return pl.CostEstimate(flops=int(2 * pairs * sum(products)), transcendentals=int(pairs), bytes_accessed=int(memory))


def _length(side: BlockLayout) -> int:
    return side.runs * side.length


def share(plan: Plan) -> float:
    """Of all pairs, how many the static mask leaves, on average over the ring: which shards meet is known on the device alone."""
    mask, keys = plan.scores.mask, _length(plan.k)
    before = _least(mask.left, mask.chunk and mask.chunk // 2)
    after = 0 if mask.causal else mask.right
    whole = 0.5 if mask.causal else 1.0
    return whole if before is None or after is None else min(whole, (before + after + 1) / keys)


def _least(*sides: int | None) -> int | None:
    return min((side for side in sides if side is not None), default=None)
