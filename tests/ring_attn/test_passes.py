"""The library's passes along a delta rule's pieces, in Triton's interpreter, with TRITON_INTERPRET=1, against the recurrence over
chunks in float64. On GPUs: tests/gpu/test_states.py."""

from itertools import pairwise

import pytest
import torch

from ring_attn.recurrence.documents import documents_of
from ring_attn.recurrence.passes import back_along, maps_along

HEADS, TOKENS, PIECES = 4, 150, 2
LENGTHS = {"whole": None, "documents": [200, 100]}  # the first is in both pieces


def operands_of(vector, key_heads, key_dim, value_dim, lengths):
    generator = torch.Generator().manual_seed(0)
    form = (PIECES, TOKENS) if lengths is None else (1, PIECES * TOKENS)

    def make(heads, dim):
        return torch.randn(*form, heads, dim, generator=generator)

    queries, keys, w = make(key_heads, key_dim), make(key_heads, key_dim) / key_dim, make(HEADS, key_dim)
    u, dy, dvalues = (make(HEADS, value_dim) for _ in range(3))
    decays = -torch.rand(*form, HEADS, *((key_dim,) if vector else ()), generator=generator)
    return queries, keys, w, u, decays, dy, dvalues


def documents_by(lengths):
    if lengths is None:
        return None, [[(0, TOKENS)], [(TOKENS, 2 * TOKENS)]]
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    documents = documents_of(ids, 1, PIECES)
    bounds = documents.cu_seqlens.tolist()
    spans = list(pairwise(bounds))
    return documents, [[span for span in spans if span[0] // TOKENS == piece] for piece in range(PIECES)]


def along(state, operands, begin, end):
    """The state after tokens ``begin`` to ``end`` of one head, and what tells its cotangent: both linear in the state."""
    queries, keys, w, u, decays, dy, dvalues = (x[begin:end] for x in operands)
    told = 0.0
    for at in (slice(start, start + 64) for start in range(0, end - begin, 64)):
        decay = decays[at]
        read, until, whole = decay.exp2(), (decay[-1] - decay).exp2(), decay[-1].exp2()
        if decay.ndim == 1:
            read, until, whole = read[:, None], until[:, None], whole.expand(state.shape[0])
        else:
            read = until = torch.ones((), dtype=state.dtype)  # keys and queries have them
        values = u[at] - w[at] @ state
        told += (dy[at] * (queries[at] * read @ state) / keys.shape[-1] ** 0.5).sum() + (dvalues[at] * values).sum()
        state = whole[:, None] * state + keys[at].mT @ (values * until)
    return state, told


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize(
    ("vector", "key_heads", "key_dim", "value_dim"), [(False, 4, 64, 128), (False, 2, 40, 24), (True, 4, 96, 80)]
)
def test_they_are_the_recurrences(vector, key_heads, key_dim, value_dim, kind):
    operands = operands_of(vector, key_heads, key_dim, value_dim, LENGTHS[kind])
    documents, spans = documents_by(LENGTHS[kind])
    queries, keys, w, u, decays, dy, dvalues = operands
    m, e = maps_along(keys, w, u, decays, documents)
    dstate = back_along(queries, keys, w, decays, dy, dvalues, documents)
    flat = [x.double().flatten(0, 1).repeat_interleave(HEADS // x.shape[2], 1) for x in operands]
    for piece in range(PIECES):
        for head in range(HEADS):
            of_head = [x[:, head] for x in flat]
            nothing = torch.zeros(key_dim, value_dim, dtype=torch.float64, requires_grad=True)
            wanted, _ = along(nothing, of_head, *spans[piece][-1])
            close(e[piece, head], wanted)
            nowhere = torch.zeros(len(of_head[3]), key_dim, dtype=torch.float64)  # no values, and no cotangents of theirs
            unit = torch.eye(key_dim, dtype=torch.float64) * (len(spans[piece]) == 1)
            close(m[piece, head], along(unit, [*of_head[:3], nowhere, of_head[4], nowhere, nowhere], *spans[piece][-1])[0])
            _, told = along(nothing, of_head, *spans[piece][0])
            close(dstate[piece, head], torch.autograd.grad(told, nothing)[0])


def close(found, wanted):
    assert (found - wanted).norm() <= 1e-5 * wanted.norm()
