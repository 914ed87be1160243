"""``RingAttention``: ``nn.MultiheadAttention`` over a sequence that is sharded across processes."""

import copy
from functools import partial
from typing import TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jax_core.config import RingAttentionConfig
from jax_core.keywords import explains
from jax_core.masks.layout import Layout
from jax_core.masks.static import make_mask
from jax_core.operands import Operands
from jax_core.options import MaskBuilder, MaskMod, Options
from ring_attn.arguments.checks import check_dense, check_inputs, check_sizes
from ring_attn.arguments.head_groups import check_head_groups
from ring_attn.arguments.names import OF_FORWARD, OF_MODULE
from ring_attn.functional import NAMES, attention
from ring_attn.generation.cache import KVCache
from ring_attn.module.bias_kv import check_dropout, join_bias_kv, of_padding
from ring_attn.module.cached import attend_with_cache
from ring_attn.module.masks import Masks, joined_segments, split_mask
from ring_attn.module.projections import repack, rows
from ring_attn.ring import Ring, as_ring
from ring_attn.sharding.sequence import unshard
from torch_bridge.backends.dispatch import backend_of
from torch_bridge.call.error_propagation import propagates_errors
from torch_bridge.mesh.protocol import tensors_per_sequence
from torch_bridge.mesh.rings import MeshDim, MeshLike

# Errors use the module's argument names.
_NAMES = {core: name for core, name in NAMES.items() if core not in ("query", "key", "value")} | {"dropout_prob": "dropout"}
_LOST_MESH = "a mesh that was not pickled"
_Ids = tuple[Tensor | None, Tensor | None]  # segment ids of the queries and of the keys


class _Factory(TypedDict):
    device: torch.device | str | None
    dtype: torch.dtype | None


class RingAttention(nn.MultiheadAttention):
    """Multi-head attention over a sequence sharded across a ring of processes; a drop-in replacement for ``nn.MultiheadAttention``.

    The constructor's arguments, ``forward``, the parameters and the state dict are those of ``nn.MultiheadAttention``. Its state
    dicts load strictly (and vice versa as long as ``num_kv_heads`` and ``sinks`` keep their defaults). With the whole
    sequence in one process it gives the same output and gradients. With a ring, each process passes its own shards, in the
    order of ``layout``, and gets its shard of the output. Parameters are replicated, and each process gets its own part of
    their gradients, to be summed over the ring as in any context-parallel model.

    Further arguments, all keyword-only:

    - ``num_kv_heads``: fewer K/V heads than query heads (GQA, MQA). The projections of keys and values, and ``bias_k`` and
      ``bias_v``, then have ``num_kv_heads * head_dim`` rows.
    - ``ring``: a :class:`ring_attn.Ring`; or ``mesh``, ``mesh_dim``, ``layout``: the ring and how the sequence is laid out on it,
      as for :func:`ring_attn.ring_attention`. The ring's ``strategy`` holds where the module names none.
    - ``causal``, ``sliding_window``, ``chunk_size``, ``softcap``, ``scale``, ``mask_mod``, ``mask_builder``, ``fused_backward``,
      ``head_groups``, ``deterministic``, ``platform``, ``strategy``, ``cfg``: as there. A cache's calls compute all heads at once.
    - ``alibi_slopes`` ``[num_heads]``: as there. An ``nn.Parameter`` is learned; any other tensor is a buffer, which moves with the
      module and is not in its state dict. (A bias on the logits is a float ``attn_mask``.)
    - ``sinks``: learned attention sinks, parameter ``sinks``: True for one per head ``[num_heads]``, n for ``[num_heads, n]``.
      They are initialised to 0.

    Differences from torch, with reasons:

    - ``need_weights`` defaults to False, and True raises, because no process ever has the weights. The result is
      ``(output, None)``.
    - ``is_causal=True`` needs no ``attn_mask`` and means causal; with an ``attn_mask`` both apply (torch takes it as a hint).
    - A float ``key_padding_mask`` can be combined with a bool ``attn_mask`` without a warning; ``attn_mask`` may be float32 with
      half-precision queries.
    - A row that may not attend to any key gives 0, where torch gives NaN.
    - The dropout pattern is keyed by position, with a seed that is drawn from torch's CPU generator in each forward (so
      ``torch.manual_seed`` and activation checkpointing replay it). Processes with the same seed drop what one process would.
      NotImplementedError in training with ``add_bias_kv``.
    - The fused inference path of ``nn.TransformerEncoderLayer`` would attend to the local shard only; ``_qkv_same_embed_dim``,
      which is always False here, disables it. Nested tensors are refused.
    - ``ring_attn.parallel.HeadParallel`` splits the heads, beside the ring; the projections are then separate (docs/torch.md).
    - A copy shares the mesh. A mesh cannot be pickled: after unpickling, set ``module.mesh``, or ``forward`` raises (None and
      "local" are kept).

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.2; Liu et al. 2023, "Ring Attention with Blockwise
    Transformers", arXiv:2310.01889.

    Raises ValueError for sizes that do not divide, a dropout outside [0, 1) and a number of sinks below 0.
    """

    _qkv_same_embed_dim: bool
    sinks: nn.Parameter | None
    alibi_slopes: Tensor | None

    @explains(OF_MODULE)
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        ring: Ring | None = None,
        mesh: MeshLike = None,
        mesh_dim: MeshDim = None,
        layout: Layout = "contiguous",
        causal: bool = False,
        sliding_window: int | tuple[int | None, int | None] | None = None,
        chunk_size: int | None = None,
        sinks: bool | int = False,
        softcap: float | None = None,
        scale: float | None = None,
        alibi_slopes: Tensor | None = None,
        mask_mod: MaskMod | None = None,
        mask_builder: MaskBuilder | None = None,
        fused_backward: bool = False,
        head_groups: int = 1,
        deterministic: bool = False,
        platform: str = "auto",
        strategy: str = "auto",
        cfg: RingAttentionConfig | None = None,
    ) -> None:
        nn.Module.__init__(self)  # MultiheadAttention's __init__ would make parameters for as many K/V heads as query heads
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_sizes(embed_dim, num_heads, num_kv_heads, dropout, sinks)
        place = as_ring(ring, mesh, mesh_dim, layout)
        make_mask(causal, sliding_window, chunk_size)
        check_head_groups(head_groups)
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim = embed_dim // num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.dropout, self.batch_first, self.add_zero_attn = dropout, batch_first, add_zero_attn
        # nn.TransformerEncoder and its layer take their fused path, which bypasses our forward, only if this is true.
        self._qkv_same_embed_dim = False
        self.mesh, self.mesh_dim, self.layout = place.mesh, place.mesh_dim, place.layout
        self.causal, self.sliding_window, self.chunk_size = causal, sliding_window, chunk_size
        self.softcap, self.scale = softcap, scale
        self.mask_mod, self.mask_builder, self.fused_backward = mask_mod, mask_builder, fused_backward
        self.head_groups, self.deterministic, self.platform, self.cfg = head_groups, deterministic, platform, cfg
        self.strategy = place.strategy if strategy == "auto" else strategy
        self._hold_slopes(alibi_slopes)
        self._make_parameters(bias, add_bias_kv, sinks, {"device": device, "dtype": dtype})
        self._reset_parameters()

    def _hold_slopes(self, alibi_slopes: Tensor | None) -> None:
        """A parameter stays a parameter; any other tensor becomes a buffer that is not in the state dict."""
        if alibi_slopes is not None and getattr(alibi_slopes, "shape", None) != (self.num_heads,):
            got = list(alibi_slopes.shape) if isinstance(alibi_slopes, Tensor) else type(alibi_slopes).__name__
            raise ValueError(f"alibi_slopes must be a tensor [num_heads] = [{self.num_heads}], got {got}")
        if isinstance(alibi_slopes, nn.Parameter):
            self.register_parameter("alibi_slopes", alibi_slopes)
        else:
            self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)

    def _make_parameters(self, bias: bool, add_bias_kv: bool, sinks: bool | int, factory: _Factory) -> None:
        kv_dim = self.num_kv_heads * self.head_dim
        rows = self.embed_dim + 2 * kv_dim
        packed = self.kdim == self.vdim == self.embed_dim
        shapes: dict[str, tuple[int, ...] | None] = {
            "in_proj_weight": (rows, self.embed_dim) if packed else None,
            "q_proj_weight": None if packed else (self.embed_dim, self.embed_dim),
            "k_proj_weight": None if packed else (kv_dim, self.kdim),
            "v_proj_weight": None if packed else (kv_dim, self.vdim),
            "in_proj_bias": (rows,) if bias else None,
            "bias_k": (1, 1, kv_dim) if add_bias_kv else None,
            "bias_v": (1, 1, kv_dim) if add_bias_kv else None,
            "sinks": None if not sinks else (self.num_heads,) if sinks is True else (self.num_heads, sinks),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, None if shape is None else nn.Parameter(torch.empty(shape, **factory)))
        self.out_proj = nn.modules.linear.NonDynamicallyQuantizableLinear(self.embed_dim, self.embed_dim, bias=bias, **factory)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:
        repack(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _reset_parameters(self) -> None:
        """The initial values of ``nn.MultiheadAttention``, drawn in the same order, so that one seed gives both the same values."""
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        for zero in (self.in_proj_bias, self.out_proj.bias, self.sinks):
            if zero is not None:
                nn.init.zeros_(zero)
        for extra in (self.bias_k, self.bias_v):
            if extra is not None:
                nn.init.xavier_normal_(extra)

    @propagates_errors(lambda self, *_, **__: (self.mesh, self.mesh_dim), OF_FORWARD)
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        q_segment_ids: Tensor | None = None,
        kv_segment_ids: Tensor | None = None,
        q_position_ids: Tensor | None = None,
        kv_position_ids: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, None]:
        """Attention of this process's queries to the keys of the whole ring: ``(output, None)``.

        With N the batch size, L and S the number of query and key positions of this process, and R the size of the ring:

        - ``query`` (L, N, embed_dim), ``key`` (S, N, kdim), ``value`` (S, N, vdim); batch first with ``batch_first``; or all
          without the batch dim. The output has the shape of ``query``, in the dtype of the projections.
        - ``key_padding_mask`` (N, S) or (S), this process's own: bool, True is not attended to; or float, added to the logits
          of its key. A float mask with values other than 0 and -inf, or with a gradient, takes a bias of N * L * S * R numbers.
        - ``attn_mask`` (L, S * R) or (N * num_heads, L, S * R): this process's rows in the order of the layout, and the
          columns of all keys in natural order: bool, True is not attended to; or float, added to the logits, differentiable.
          Cut its rows with ``ring_attn.shard(attn_mask, mesh, dim=-2, layout=layout)``.
        - ``is_causal``: causal, like the constructor's ``causal``.
        - ``average_attn_weights`` has no effect, because weights are never returned.
        - ``q_segment_ids`` and ``kv_segment_ids`` (N, L) and (N, S), ``q_position_ids`` and ``kv_position_ids``: as for
          :func:`ring_attn.ring_attention`. One side is enough for both if the lengths agree.
        - ``cache``: keeps keys and values for generation (:class:`ring_attn.generation.KVCache`); without masks and ids.

        The keys of ``add_bias_kv`` and ``add_zero_attn`` are visible to every query, regardless of masks, windows and segments.

        Raises ValueError for shapes, dtypes or lengths that do not fit, NotImplementedError for ``need_weights=True``.
        """
        self._check_call(query, key, value, need_weights)
        batched = query.ndim == 3
        # Keep identical tensors identical, so that self-attention projects once.
        q = self._batch_first(query)
        k = q if key is query else self._batch_first(key)
        v = k if value is key else q if value is query else self._batch_first(value)
        check_inputs(q, k, v, (self.embed_dim, self.kdim, self.vdim))
        masks = self._masks(q, k, key_padding_mask, attn_mask, (q_segment_ids, kv_segment_ids))
        options = {**masks._asdict(), "q_position_ids": q_position_ids, "kv_position_ids": kv_position_ids}
        attend = self._core_attention if cache is None else partial(attend_with_cache, self, cache, q is k is v)
        out = attend(*self._project(q, k, v), causal=self.causal or is_causal, **options)
        out = self.out_proj(out.flatten(2))
        return (out if self.batch_first else out.transpose(0, 1)) if batched else out.squeeze(0), None

    def extra_repr(self) -> str:
        names = ("embed_dim", "num_heads", "num_kv_heads", "layout", "causal", "sliding_window", "chunk_size", "softcap", "dropout")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    def __copy__(self) -> "RingAttention":
        new = type(self).__new__(type(self))
        new.__setstate__(self.__dict__.copy())  # not __getstate__, which is for pickling
        return new

    def __deepcopy__(self, memo: dict[int, object]) -> "RingAttention":
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        memo[id(self.mesh)] = self.mesh  # process groups cannot be copied, and a copy belongs to the same ring
        new.__setstate__(copy.deepcopy(self.__dict__, memo))
        return new

    def __getstate__(self) -> dict[str, object]:
        picklable = self.mesh is None or isinstance(self.mesh, str)
        return {**self.__dict__, "mesh": self.mesh if picklable else _LOST_MESH}

    def _check_call(self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool) -> None:
        if need_weights:
            raise NotImplementedError(
                "RingAttention cannot return the attention weights, because no process ever has them all; call with "
                "need_weights=False, or take the weights of a whole sequence from nn.MultiheadAttention with this state dict"
            )
        if query.is_nested or key.is_nested or value.is_nested:
            raise ValueError(
                "RingAttention takes no nested tensors; build nn.TransformerEncoder with enable_nested_tensor=False, or pass "
                "padded tensors and a key_padding_mask"
            )
        for name, x in (("query", query), ("key", key), ("value", value)):
            check_dense(name, x)
        if not query.ndim == key.ndim == value.ndim:
            dims = f"{query.ndim}, {key.ndim} and {value.ndim}"
            raise ValueError(f"query, key and value must all have a batch dim or none, got {dims} dims")
        if isinstance(self.mesh, str) and self.mesh == _LOST_MESH:
            raise ValueError("this RingAttention was unpickled, which loses its mesh; set module.mesh before calling it")

    def _batch_first(self, tensor: Tensor) -> Tensor:
        if tensor.ndim == 2:
            return tensor.unsqueeze(0)
        return tensor if self.batch_first or tensor.ndim != 3 else tensor.transpose(0, 1)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes = rows(self)
        if self.in_proj_weight is not None and query is key and key is value:
            q, k, v = F.linear(query, self.in_proj_weight, self.in_proj_bias).split(sizes, -1)
        else:
            separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            weights = separate if self.in_proj_weight is None else self.in_proj_weight.split(sizes)
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.split(sizes)
            q, k, v = (F.linear(*args) for args in zip((query, key, value), weights, biases, strict=True))
        q, k, v = (projected.unflatten(-1, (-1, self.head_dim)) for projected in (q, k, v))
        return q, k, v

    def _masks(self, query: Tensor, key: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, ids: _Ids) -> Masks:
        mask, bias = self._attention_mask(attn_mask, query, key)
        if key_padding_mask is None:
            return Masks(mask, bias, *ids)
        padding, added = self._padding(key_padding_mask, query, key)
        if added is not None:
            bias = added if bias is None else bias + added
        return Masks(mask, bias, *joined_segments(padding, query, *ids))

    def _attention_mask(self, attn_mask: Tensor | None, query: Tensor, key: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if attn_mask is None:
            return None, None
        (batch, rows), columns = query.shape[:2], key.shape[1] * self._ring_size(key)
        expected = ((rows, columns), (batch * self.num_heads, rows, columns))
        if tuple(attn_mask.shape) not in expected:
            raise ValueError(
                f"attn_mask must be {expected[0]} or {expected[1]} (batch * heads, this process's query rows, all key positions "
                f"in natural order), got {tuple(attn_mask.shape)}; cut the rows of a whole mask with ring_attn.shard(dim=-2)"
            )
        forbidden, bias = split_mask(attn_mask, "attn_mask")
        shape = (1, 1, rows, columns) if attn_mask.ndim == 2 else (batch, self.num_heads, rows, columns)
        return ~forbidden.reshape(shape), None if bias is None else bias.reshape(shape)

    def _padding(self, key_padding_mask: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor | None]:
        """Which of this process's keys are padding ``[N, S]``, and what is added to the logits ``[N, 1, L, S * R]``, or None."""
        expected = tuple(key.shape[:2])
        mask = key_padding_mask.unsqueeze(0) if key_padding_mask.ndim == 1 else key_padding_mask
        if tuple(mask.shape) != expected:
            raise ValueError(
                f"key_padding_mask must be {expected}, the batch and this process's key positions, got "
                f"{tuple(key_padding_mask.shape)}; cut a whole mask with ring_attn.shard(dim=-1)"
            )
        forbidden, added = split_mask(mask, "key_padding_mask")
        if added is None:
            return forbidden, None
        # nn.TransformerEncoder turns a bool mask into one of 0 and -inf, which segment ids express fully in memory linear in the
        # sequence. The mask is gathered so that every process of the ring makes the same decision.
        added = unshard(added, self.mesh, mesh_dim=self.mesh_dim, layout=self.layout)
        if not added.requires_grad and not bool(added.any()):
            return forbidden, None
        return forbidden, added[:, None, None, :].expand(-1, 1, query.shape[1], -1)

    def _core_attention(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **tensors: Tensor | None) -> Tensor:
        check_dropout(self)
        dropout_p = self.dropout if self.training else 0.0
        # Drawn on the CPU, where torch.manual_seed and checkpointing restore the generator; nothing is drawn without dropout.
        seed = torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu") if dropout_p > 0 else None
        sinks = self._all_sinks()
        operands = Operands(q, k, v).replaced(softmax_aux=sinks, alibi_slopes=self.alibi_slopes, **tensors)
        options = Options(
            causal=causal,
            sliding_window=self.sliding_window,
            chunk_size=self.chunk_size,
            logits_soft_cap=self.softcap,
            softmax_scale=self.scale,
            dropout_prob=dropout_p,
            layout=self.layout,
            mask_mod=self.mask_mod,
            mask_builder=self.mask_builder,
            platform=self.platform,
            strategy=self.strategy,
            cfg=self.cfg,
            fused_backward=self.fused_backward,
            deterministic=self.deterministic,
            lse_gradient=self.bias_k is not None,
        )
        where = self.mesh, self.mesh_dim
        out, lse = attention(_NAMES, where, operands, options, dropout_seed=seed, head_groups=self.head_groups)
        if self.bias_k is None:
            return out
        lse = of_padding(lse, sinks, tensors)
        return join_bias_kv(self, q, out, lse)

    def _all_sinks(self) -> Tensor | None:
        """[num_heads, n]. ``add_zero_attn``'s key of zeros has logit 0 and adds the value 0: it is a sink at 0."""
        learned = [] if self.sinks is None else [self.sinks.reshape(self.num_heads, -1)]
        zero = [self.out_proj.weight.new_zeros(self.num_heads, 1)] if self.add_zero_attn else []
        return torch.cat(learned + zero, 1) if learned or zero else None

    def _ring_size(self, shard: Tensor) -> int:
        """How many tensors like ``shard`` make up the whole sequence."""
        return tensors_per_sequence(backend_of(shard.device).resolve(self.mesh, self.mesh_dim))
