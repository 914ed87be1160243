"""Dense attention of each document by itself, and batches as TRL's and axolotl's collators return them."""

from itertools import pairwise

import torch
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal=False, window=(-1, -1), slopes=None, softcap=0.0, chunk=None, by=None):
    """``[seq, heads, dim]`` -> out and lse ``[heads, seq]``. ``by``: the position of query 0; None: the last query is at the last
    key."""
    by = k.shape[0] - q.shape[0] if by is None else by
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    at, other = torch.arange(q.shape[0])[:, None] + by, torch.arange(k.shape[0])[None]
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores - slopes[:, None, None] * (at - other).abs()
    seen = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool)
    seen &= (other <= at) | (not causal)
    seen &= (other >= at - window[0]) | (window[0] < 0)
    seen &= (other <= at + window[1]) | (window[1] < 0)
    if chunk is not None:
        seen &= (other <= at) & (other // chunk == at // chunk)
    some = seen.any(1)
    scores = scores.masked_fill(~seen & some[:, None], -torch.inf)  # a row that sees nothing is set to 0 below
    lse = scores.logsumexp(-1).masked_fill(~some, -torch.inf)
    weights = torch.softmax(scores, -1) * some[:, None]
    return torch.einsum("hqk,khd->qhd", weights, v), lse


def of_documents(q: Tensor, k: Tensor, v: Tensor, cu_q, cu_k=None, **options) -> tuple[Tensor, Tensor]:
    """Every document by itself, ``[tokens, heads, dim]``; 0 and ``-inf`` on padding after the last."""
    spans = list(zip(pairwise(list(cu_q)), pairwise(list(cu_q if cu_k is None else cu_k)), strict=True))
    parts = [attention(q[a:b], k[c:d], v[c:d], **options) for (a, b), (c, d) in spans]
    rest = q.shape[0] - int(cu_q[-1])
    outs = [out for out, _ in parts] + [q.new_zeros(rest, q.shape[1], v.shape[2])]
    lses = [lse for _, lse in parts] + [q.new_full((q.shape[1], rest), -torch.inf)]
    return torch.cat(outs), torch.cat(lses, 1)


def trl_batch(documents: list[list[int]], multiple: int = 1) -> dict:
    """As TRL's DataCollatorForLanguageModeling(padding_free=True) returns it: one row, where each padding token is a document."""
    total = sum(map(len, documents))
    rest = -total % multiple
    ids = torch.tensor([[token for document in documents for token in document] + [0] * rest])
    positions = torch.tensor([[i for document in documents for i in range(len(document))] + [0] * rest])
    ends = torch.cat([(positions[0] == 0).nonzero().flatten(), torch.tensor([total + rest])]).int()
    longest = int(ends.diff().max())
    numbers = torch.repeat_interleave(torch.arange(len(ends) - 1, dtype=torch.int32), ends.diff())[None]
    return dict(
        input_ids=ids,
        labels=ids.masked_fill(positions == 0, -100),
        position_ids=positions,
        cu_seq_lens_q=ends,
        cu_seq_lens_k=ends,
        max_length_q=longest,
        max_length_k=longest,
        seq_idx=numbers,
    )


def axolotl_batch(rows: list[list[list[int]]]) -> dict:
    """As axolotl's V2BatchSamplerDataCollatorForSeq2Seq returns it: documents numbered by the attention mask, padded on the right,
    where positions count on their own."""
    length = max(sum(map(len, row)) for row in rows)
    batch: dict[str, list] = {name: [] for name in ("input_ids", "labels", "attention_mask", "position_ids")}
    for row in rows:
        rest = length - sum(map(len, row))
        tokens = [token for document in row for token in document]
        batch["input_ids"].append(tokens + [0] * rest)
        batch["labels"].append(tokens + [-100] * rest)
        batch["attention_mask"].append([i + 1 for i, document in enumerate(row) for _ in document] + [0] * rest)
        batch["position_ids"].append([i for document in row for i in range(len(document))] + list(range(rest)))
    return {name: torch.tensor(values) for name, values in batch.items()}
