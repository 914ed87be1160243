"""flash-linear-attention's delta rules in the steps of their kernels, as fla-core 0.6 has them: what a chunk makes of its keys and
values (``w``, ``u`` and the inverse that they come by) depends on no state, and is made once for the maps and the output. The maps,
and the cotangent of the state that enters, are passes of the library's own kernels (:mod:`ring_attn.recurrence.passes`).

Imports fla, so this is imported where its operators are known to be there (:func:`ring_attn.recurrence.operators.steps_of_fla`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fla.modules.l2norm import l2norm_bwd, l2norm_fwd  # type: ignore[import-not-found]
from fla.ops.common.chunk_delta_h import (  # type: ignore[import-not-found]
    chunk_gated_delta_rule_bwd_dhu,
    chunk_gated_delta_rule_fwd_h,
)
from fla.ops.common.chunk_o import chunk_bwd_dqkwg, chunk_bwd_dv_local, chunk_fwd_o  # type: ignore[import-not-found]
from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]
from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra  # type: ignore[import-not-found]
from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd, recompute_w_u_fwd  # type: ignore[import-not-found]
from fla.ops.gla.chunk import chunk_gla_fwd_o_gk  # type: ignore[import-not-found]
from fla.ops.kda import chunk_kda  # type: ignore[import-not-found]
from fla.ops.kda.chunk_bwd import chunk_kda_bwd_dAv, chunk_kda_bwd_wy_dqkg_fused  # type: ignore[import-not-found]
from fla.ops.kda.chunk_intra import chunk_kda_bwd_intra, chunk_kda_fwd_intra  # type: ignore[import-not-found]
from fla.ops.kda.wy_fast import recompute_w_u_fwd as recompute_w_u_of_kda  # type: ignore[import-not-found]
from fla.ops.utils import chunk_local_cumsum, prepare_chunk_indices  # type: ignore[import-not-found]
from fla.ops.utils.constant import RCP_LN2  # type: ignore[import-not-found]
from torch import Tensor

from ring_attn.recurrence.documents import Documents
from ring_attn.recurrence.passes import CHUNK, back_along, maps_along
from ring_attn.recurrence.pieces import Tensors


class Saved(NamedTuple):
    """Of the operands, what a backward needs: ``q`` and ``k`` normed, with the norms, ``sums`` of the log decays along each chunk,
    and ``inner``, what else a chunk makes of itself, by the operator."""

    q: Tensor
    k: Tensor
    v: Tensor
    sums: Tensor
    beta: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    inner: Tensors

    @classmethod
    def of(cls, kept: Tensors) -> "Saved":
        q, k, v, sums, beta, q_norm, k_norm, *inner = kept
        return cls(q, k, v, sums, beta, q_norm, k_norm, inner)


class OfFla:
    """Of ``q, k, v, g, beta``; queries and keys may have fewer heads. ``decays``: the name of fla's argument."""

    decays: str

    def __init__(self, l2norm: bool, documents: Documents | None) -> None:
        self.l2norm, self.documents = l2norm, documents
        self.along: dict[str, Any] = {}
        if documents is not None:
            indices = prepare_chunk_indices(documents.cu_seqlens, CHUNK)
            self.along = {"cu_seqlens": documents.cu_seqlens, "chunk_indices": indices}

    def maps(self, operands: Tensors) -> tuple[Tensor, Tensor, Tensors]:
        self.forms = [(x.shape, x.dtype) for x in operands]
        q, k, v, g, beta = (self._flat(x) for x in operands)
        (q, q_norm), (k, k_norm) = (l2norm_fwd(x) if self.l2norm else (x, None) for x in (q, k))
        sums = chunk_local_cumsum(g, chunk_size=CHUNK, scale=RCP_LN2, **self.along)
        keys, w, u, inner = self.in_chunks(q, k, v, sums, beta)
        m, e = maps_along(keys, w, u, sums, self.documents)
        return m, e, (q, k, v, sums, beta, q_norm, k_norm, *inner, keys, w, u)

    def output(self, kept: Tensors, entering: Tensor, wanted: Sequence[bool]) -> tuple[Tensor, Tensors]:
        *kept, keys, w, u = kept
        saved = Saved.of(kept)
        h, values = self._states(keys, w, u, saved.sums, entering)
        y: Tensor = self.read(saved, values, h)
        return y.view(self.forms[2][0]).to(self.forms[0][1]), kept

    def back_to_state(self, kept: Tensors, entering: Tensor, dy: Tensor) -> tuple[Tensor, Tensors]:
        saved, dy = Saved.of(kept), self._flat(dy)
        queries, keys, w, u = self.in_chunks_again(saved)
        h, values = self._states(keys, w, u, saved.sums, entering)
        dinner, dv = self.back_in_chunks(saved, values, dy)
        direct = back_along(queries, keys, w, saved.sums, dy, dv, self.documents)
        return direct, (saved, dinner, queries, keys, w, h, values, dy, dv)

    def back_to_operands(
        self, kept: Tensors, entering: Tensor, dy: Tensor, dleft: Tensor, wanted: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        saved, dinner, queries, keys, w, h, values, dy, dv = kept
        dh, dv = self._back(queries, keys, w, saved.sums, dy, dv, dleft)
        dq, dk, dv, dsums, dbeta = self.gradients(saved, dinner, w, h, values, dh, dy, dv)
        dg = chunk_local_cumsum(dsums, chunk_size=CHUNK, reverse=True, **self.along)
        if self.l2norm:
            dq, dk = l2norm_bwd(saved.q, saved.q_norm, dq), l2norm_bwd(saved.k, saved.k_norm, dk)
        return [x.view(shape).to(dtype) for x, (shape, dtype) in zip((dq, dk, dv, dg, dbeta), self.forms, strict=True)]

    def in_chunks(self, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensors]:
        """Keys as the states take them, ``w``, ``u``, and ``inner``."""
        raise NotImplementedError

    def in_chunks_again(self, saved: Saved) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries and keys as the states take them, ``w`` and ``u``."""
        raise NotImplementedError

    def read(self, saved: Saved, values: Tensor, h: Tensor) -> Any:
        """The output, of what each chunk's tokens add to its state ``h``, and of that."""
        raise NotImplementedError

    def back_in_chunks(self, saved: Saved, values: Tensor, dy: Tensor) -> tuple[Tensor | None, Tensor]:
        """Cotangents within a chunk: of ``inner``, where it has one of its own, and of the values."""
        raise NotImplementedError

    def gradients(
        self, saved: Saved, dinner: Any, w: Tensor, h: Tensor, values: Tensor, dh: Tensor, dy: Tensor, dv: Tensor
    ) -> tuple[Tensor, ...]:
        """Of ``q, k, v, sums, beta``."""
        raise NotImplementedError

    def _states(self, keys: Tensor, w: Tensor, u: Tensor, sums: Tensor, entering: Tensor) -> tuple[Tensor, Tensor]:
        """Each chunk's state, and what its tokens add to it."""
        first = entering if self.documents is None else self.documents.of_first(entering)
        named = {self.decays: sums, "initial_state": first}
        h, values, _ = chunk_gated_delta_rule_fwd_h(k=keys, w=w, u=u, **named, **self.along)
        return h, values

    def _back(
        self, queries: Tensor, keys: Tensor, w: Tensor, sums: Tensor, dy: Tensor, dv: Tensor, dleft: Tensor
    ) -> tuple[Tensor, Tensor]:
        leaving = dleft if self.documents is None else self.documents.of_last(dleft)
        named = {self.decays: sums, "dht": leaving, "scale": keys.shape[-1] ** -0.5}
        dh, _, dv = chunk_gated_delta_rule_bwd_dhu(q=queries, k=keys, w=w, do=dy, dv=dv, **named, **self.along)
        return dh, dv

    def _flat(self, x: Tensor) -> Tensor:
        return (x if self.documents is None else x.flatten(0, 1)[None]).contiguous()


class GatedDeltaRule(OfFla):
    decays = "g"

    def in_chunks(self, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensors]:
        w, u, inverse = chunk_gated_delta_rule_fwd_intra(k=k, v=v, g=sums, beta=beta, chunk_size=CHUNK, **self.along)
        return k, w, u, (inverse,)

    def in_chunks_again(self, saved: Saved) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v, sums, beta, _, _, (inverse,) = saved
        return q, k, *recompute_w_u_fwd(k=k, v=v, beta=beta, A=inverse, g=sums, **self.along)

    def read(self, saved: Saved, values: Tensor, h: Tensor) -> Any:
        q, k, sums = saved.q, saved.k, saved.sums
        return chunk_fwd_o(q=q, k=k, v=values, h=h, g=sums, scale=k.shape[-1] ** -0.5, chunk_size=CHUNK, **self.along)

    def back_in_chunks(self, saved: Saved, values: Tensor, dy: Tensor) -> tuple[Tensor | None, Tensor]:
        q, k, sums = saved.q, saved.k, saved.sums
        return None, chunk_bwd_dv_local(q=q, k=k, do=dy, g=sums, scale=k.shape[-1] ** -0.5, chunk_size=CHUNK, **self.along)

    def gradients(
        self, saved: Saved, dinner: None, w: Tensor, h: Tensor, values: Tensor, dh: Tensor, dy: Tensor, dv: Tensor
    ) -> tuple[Tensor, ...]:
        q, k, v, sums, beta, _, _, (inverse,) = saved
        states = {"h": h, "dh": dh, "scale": k.shape[-1] ** -0.5, "chunk_size": CHUNK}
        dq, dk, dw, dsums = chunk_bwd_dqkwg(q=q, k=k, v=values, w=w, g=sums, do=dy, dv=dv, **states, **self.along)
        dk_of_w, dv, dbeta, dsums_of_w = prepare_wy_repr_bwd(k=k, v=v, beta=beta, g=sums, A=inverse, dw=dw, du=dv, **self.along)
        return dq, dk.add_(dk_of_w), dv, dsums.add_(dsums_of_w), dbeta


class Kda(OfFla):
    decays = "gk"

    def in_chunks(self, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensors]:
        named = {"gk": sums, "beta": beta, "scale": k.shape[-1] ** -0.5, "chunk_size": CHUNK}
        w, u, _, keys, scores, inverse = chunk_kda_fwd_intra(q=q, k=k, v=v, **named, **self.along)
        return keys, w, u, (scores, inverse)

    def in_chunks_again(self, saved: Saved) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v, sums, beta, _, _, (_, inverse) = saved
        w, u, queries, keys = recompute_w_u_of_kda(q=q, k=k, v=v, beta=beta, A=inverse, gk=sums, **self.along)
        return queries, keys, w, u

    def read(self, saved: Saved, values: Tensor, h: Tensor) -> Any:
        named = {"A": saved.inner[0], "scale": saved.k.shape[-1] ** -0.5, "chunk_size": CHUNK}
        return chunk_gla_fwd_o_gk(q=saved.q, v=values, g=saved.sums, h=h, **named, **self.along)

    def back_in_chunks(self, saved: Saved, values: Tensor, dy: Tensor) -> tuple[Tensor | None, Tensor]:
        named = {"A": saved.inner[0], "scale": saved.k.shape[-1] ** -0.5, "chunk_size": CHUNK}
        results: tuple[Tensor, Tensor] = chunk_kda_bwd_dAv(q=saved.q, k=saved.k, v=values, do=dy, **named, **self.along)
        return results

    def gradients(
        self, saved: Saved, dinner: Tensor, w: Tensor, h: Tensor, values: Tensor, dh: Tensor, dy: Tensor, dv: Tensor
    ) -> tuple[Tensor, ...]:
        q, k, v, sums, beta, _, _, (_, inverse) = saved
        along = {"chunk_size": CHUNK, **self.along}
        states = {"h": h, "dh": dh, "scale": k.shape[-1] ** -0.5}
        dq, dk, dv, dbeta, dsums, dinverse = chunk_kda_bwd_wy_dqkg_fused(
            q=q, k=k, v=v, v_new=values, g=sums, beta=beta, A=inverse, do=dy, dv=dv, **states, **along
        )
        found = {"dAqk": dinner, "dAkk": dinverse, "dq": dq, "dk": dk, "db": dbeta, "dg": dsums}
        dq, dk, dbeta, dsums = chunk_kda_bwd_intra(q=q, k=k, g=sums, beta=beta, **found, **along)
        dq, dk = (x if x.shape == q.shape else x.unflatten(2, (q.shape[2], -1)).sum(3) for x in (dq, dk))
        return dq, dk, dv, dsums, dbeta


STEPS: tuple[tuple[Callable[..., Any], type[OfFla]], ...] = ((chunk_gated_delta_rule, GatedDeltaRule), (chunk_kda, Kda))
