"""Run by torchrun on 4 processes: packed attention on rings of 2 and 4 against every document's own dense attention.

Every process makes the same whole tensors and compares its part of the output, the LSE and every gradient. test_packed.py runs the
same checks in its own process on a ring of one, with more cases: a program for a ring takes long to compile.
"""

from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from packed_reference import attention, axolotl_batch, of_documents, trl_batch
from torch.distributed.device_mesh import init_device_mesh

from jax_core.masks.layout import LAYOUTS, shard_indices
from ring_attn import Ring, flash, ring_attention, shard_packed
from torch_bridge.start.runtime import start

HEADS, KV_HEADS, DIM = 4, 2, 8
TOTAL = 64
DOCUMENTS = [0, 16, 24, 24, 56, 64]  # divisible by 8: each can be cut in zigzag over 4 ranks
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 3e-2}


def inputs(queries: int = TOTAL, keys: int = TOTAL, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    shapes = (queries, HEADS, DIM), (keys, KV_HEADS, DIM), (keys, KV_HEADS, DIM), (queries, HEADS, DIM)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def with_gradients(function, tensors, weight):
    """The results of ``function(q, k, v) -> (out, lse)``, and the gradients of ``(out * weight).sum()`` plus the finite LSEs."""
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    out, lse = function(*tensors)
    ((out * weight).sum() + lse.masked_fill(lse == -torch.inf, 0).sum()).backward()
    return out.detach(), lse.detach(), *(x.grad for x in tensors)


def compare(case, own, expected, held_q, held_k, dtype):
    """``held_q``, ``held_k``: where this rank's queries and keys are in the whole sequence."""
    bound = TOLERANCE[dtype]
    dims = {"out": 0, "lse": 1, "dq": 0, "dk": 0, "dv": 0}
    for (name, dim), here, whole in zip(dims.items(), own, expected, strict=True):
        held = held_k if name in ("dk", "dv") else held_q
        torch.testing.assert_close(
            here.double(),
            whole.index_select(dim, held).double(),
            rtol=bound,
            atol=bound,
            msg=lambda text, name=name: f"{case} {name}: {text}",
        )


def indices(layout, rank, size, length):
    return torch.tensor(shard_indices(layout, rank, size, length))


def check(case, function, reference, held_q, held_k, *, queries=TOTAL, keys=TOTAL, dtype=torch.float64):
    """``function(q, k, v) -> (out, lse)`` of this rank's shards; ``reference`` of the whole tensors."""
    q, k, v, weight = inputs(queries, keys, dtype)
    expected = with_gradients(reference, [x.double() for x in (q, k, v)], weight.double())
    own = with_gradients(function, [q[held_q], k[held_k], v[held_k]], weight[held_q])
    compare(case, own, expected, held_q, held_k, dtype)


THD = {
    "documents": dict(rings=(1,), documents=DOCUMENTS, causal=True),
    "padded after the last document": dict(rings=(1,), documents=[0, 30, 59], causal=True, sliding_window=(7, 0)),
    "chunks from each document's start": dict(rings=(1,), documents=[0, 30, 59], chunk_size=5),
    "fewer queries than keys": dict(rings=(1, 4), documents=[0, 5, 5, 24], keys=[0, 17, 20, 52], causal=True, bottom_right=True),
    "more queries than keys": dict(rings=(1,), documents=[0, 17, 20, 48], keys=[0, 5, 5, 20], causal=True, bottom_right=True),
    "from the first key": dict(rings=(1,), documents=[0, 5, 5, 24], keys=[0, 17, 20, 52], causal=True),
}
LENGTHS = {"fewer queries than keys": (24, 56), "more queries than keys": (48, 24), "from the first key": (24, 56)}


def check_thd(mesh, rank, size):
    for i, (case, settings) in enumerate(THD.items()):
        settings = dict(settings)
        if size not in settings.pop("rings"):
            continue
        layout = LAYOUTS[(i + 1) % 3]
        queries, keys = LENGTHS.get(case, (TOTAL, TOTAL))
        cu_q, cu_k = settings.pop("documents"), settings.pop("keys", None)
        arrays = dict(cu_seqlens_q=torch.tensor(cu_q), cu_seqlens_k=None if cu_k is None else torch.tensor(cu_k, dtype=torch.int64))
        options = dict(mesh=mesh, layout=layout, qkv_format="thd", return_lse=True, **arrays, **settings)
        dense = dict(causal=settings.get("causal", False), window=settings.get("sliding_window", (-1, -1)))
        dense |= dict(chunk=settings.get("chunk_size"), by=0 if case == "from the first key" else None)
        check(
            f"thd {case}",
            lambda q, k, v, options=options: ring_attention(q, k, v, **options),
            lambda q, k, v, cu_q=cu_q, cu_k=cu_k, dense=dense: of_documents(q, k, v, cu_q, cu_k, **dense),
            indices(layout, rank, size, queries),
            indices(layout, rank, size, keys),
            queries=queries,
            keys=keys,
        )


DENSE = {
    "causal": dict(causal=True),
    "window": dict(sliding_window=(9, 2)),
    "slopes": dict(causal=True, alibi_slopes=torch.rand(HEADS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))),
    "chunk": dict(chunk_size=11),
}


def check_bottom_right(mesh, rank, size):
    """Dense batches of which the last query meets the last key, in every layout."""
    for i, (case, options) in enumerate(DENSE.items()):
        if size > 1 and case != "window":
            continue
        for queries, keys in ((16, 56), (40, 24)) if case == "causal" else ((16, 56),):
            layout = LAYOUTS[i % 3]
            dense = dict(causal=options.get("causal", False), window=options.get("sliding_window", (-1, -1)))
            dense |= dict(slopes=options.get("alibi_slopes"), chunk=options.get("chunk_size"))

            def ours(q, k, v, options=options, layout=layout):
                found = ring_attention(
                    q[:, None],
                    k[:, None],
                    v[:, None],
                    mesh=mesh,
                    layout=layout,
                    qkv_format="sbhd",
                    bottom_right=True,
                    return_lse=True,
                    **options,
                )
                return found[0][:, 0], found[1][0]

            held = indices(layout, rank, size, queries), indices(layout, rank, size, keys)
            reference = lambda q, k, v, dense=dense: attention(q, k, v, **dense)  # noqa: E731
            check(f"bottom right {case} {layout}", ours, reference, *held, queries=queries, keys=keys)


def per_document(layout, rank, size):
    """Where the tokens of a rank are, if each document is laid out by itself."""
    spans = pairwise(DOCUMENTS)
    return torch.cat([start + indices(layout, rank, size, stop - start) for start, stop in spans if stop > start])


def check_flash_varlen(mesh, rank, size):
    whole = torch.tensor(DOCUMENTS, dtype=torch.int32)
    local = whole // size
    longest = int(whole.diff().max())
    own = {layout: per_document(layout, rank, size) for layout in LAYOUTS}
    cut = indices("contiguous", rank, size, TOTAL)
    prepared = flash.llama3_flash_attn_prepare_cu_seqlens(whole, True, rank, size)
    given = {
        "flash_attn_varlen": (cut, (whole, whole, longest, longest), (whole, longest)),
        "ring_flash_attn_varlen": (own["contiguous"], (local, longest // size), None),
        "zigzag_ring_flash_attn_varlen": (own["zigzag"], (local, longest // size), None),
        "stripe_flash_attn_varlen": (own["striped"], (local, longest // size), None),
        "llama3_flash_attn_varlen": (cut, (*prepared[:4], 1, prepared[4]), None),
    }
    options = dict(causal=True, window_size=(11, 0), return_attn_probs=True, deterministic=True, group=mesh)
    reference = lambda q, k, v: of_documents(q, k, v, DOCUMENTS, causal=True, window=(11, 0))  # noqa: E731
    for name, (held, arguments, of_qkv) in given.items():
        function = getattr(flash, f"{name}_func")
        check(name, lambda *qkv, f=function, a=arguments: f(*qkv, *a, **options)[:2], reference, held, held)
        packed = getattr(flash, f"{name}_kvpacked_func")
        check(
            f"{name} kvpacked",
            lambda q, k, v, f=packed, a=arguments: f(q, torch.stack([k, v], 1), *a, **options)[:2],
            reference,
            held,
            held,
        )
        if size > 1:
            continue
        packed, arguments = getattr(flash, f"{name}_qkvpacked_func"), arguments if of_qkv is None else of_qkv
        q, k, v, _ = inputs()
        qkv = torch.stack([q[:, :KV_HEADS], k, v], 1)
        out = packed(qkv[held], *arguments, **(options | dict(return_attn_probs=False)))
        expected = reference(qkv[:, 0], qkv[:, 1], qkv[:, 2])[0][held]
        torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)


def check_flash_dense(mesh, rank, size):
    for layout, name in zip(LAYOUTS, ("ring_flash_attn", "zigzag_ring_flash_attn", "stripe_flash_attn"), strict=True):
        if size > 1 and layout == "contiguous":
            continue
        held = indices(layout, rank, size, TOTAL)
        dtype = {"contiguous": torch.float64, "zigzag": torch.float32, "striped": torch.bfloat16}[layout]
        options = dict(causal=True, softcap=3.0, return_attn_probs=True, group=mesh)

        def kvpacked(q, k, v, name=name, options=options):
            out, lse, none = getattr(flash, f"{name}_kvpacked_func")(q[None], torch.stack([k, v], 1)[None], **options)
            assert none is None
            return out[0], lse[0]

        check(name, kvpacked, lambda q, k, v: attention(q, k, v, causal=True, softcap=3.0), held, held, dtype=dtype)
    if size > 1:
        return
    q, k, v, _ = inputs()
    qkv = torch.stack([q[:, :KV_HEADS], k, v], 1)
    for packed in ("flash_attn_qkvpacked_func", "stripe_flash_attn_qkvpacked_func"):
        out = getattr(flash, packed)(qkv[None], 0.0, None, True, group=mesh)[0]
        torch.testing.assert_close(out, attention(*qkv.unbind(1), causal=True)[0], rtol=1e-11, atol=1e-11)

    def flash_attn(q, k, v):
        out, lse, _ = flash.flash_attn_func(q[None], k[None], v[None], causal=True, return_attn_probs=True, group=mesh)
        return out[0], lse[0]

    held = indices("contiguous", rank, size, 16), indices("contiguous", rank, size, 56)
    check("flash_attn_func", flash_attn, lambda q, k, v: attention(q, k, v, causal=True), *held, queries=16, keys=56)


class Model(torch.nn.Module):
    """Tokens and their positions in, logits out; attention is whatever is passed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.tokens, self.places = torch.nn.Embedding(50, 16), torch.nn.Embedding(64, 16)
        self.qkv, self.head = torch.nn.Linear(16, 48), torch.nn.Linear(16, 50)
        self.double()

    def forward(self, input_ids, position_ids, attend):
        x = self.tokens(input_ids) + self.places(position_ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).unbind(-3)
        return self.head(attend(q, k, v).flatten(-2))


def documents_of(seed: int, *lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 50, (length,), generator=generator).tolist() for length in lengths]


def check_training(mesh, rank, size):
    """A packed batch trains like its documents one by one: loss, gradients, and logits in the order of the batch."""
    first, second = documents_of(1, 3, 21, 1, 9, 6), documents_of(2, 12, 5)
    batches = {
        "TRL": (trl_batch(first + second, multiple=8), [first + second]),
        "axolotl": (axolotl_batch([first, second]), [first, second]),
    }
    for name, (batch, rows) in batches.items():
        model = Model()
        logits = [[model(torch.tensor([d]), torch.arange(len(d))[None], one_document) for d in row] for row in rows]
        losses = [
            F.cross_entropy(out[0, :-1], torch.tensor(document[1:]), reduction="sum")
            for outs, row in zip(logits, rows, strict=True)
            for out, document in zip(outs, row, strict=True)
            if len(document) > 1
        ]
        count = sum(len(document) - 1 for row in rows for document in row)
        expected = sum(losses) / count
        expected.backward()
        wanted = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
        model.zero_grad()

        shard = shard_packed(batch, Ring(mesh, layout="zigzag"), pad_to_multiple_of=16)
        assert shard.label_count == count
        attend = lambda q, k, v, shard=shard: shard.ring.attention(q, k, v, causal=True, **shard.attention)  # noqa: E731
        out = model(shard.input_ids, shard.position_ids, attend)
        every = F.cross_entropy(out.flatten(0, 1), shard.labels.flatten(), reduction="none")
        loss = (every * shard.loss_weights.flatten()).sum()
        loss.backward()
        total = loss.detach().clone()
        if shard.ring.size > 1:
            for tensor in (total, *(parameter.grad for parameter in model.parameters())):
                dist.all_reduce(tensor, group=shard.ring.group)
        torch.testing.assert_close(total, expected.detach(), rtol=1e-6, atol=1e-6)  # the weights are float32
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[key], rtol=1e-6, atol=1e-8, msg=lambda t, k=key: f"{k}: {t}")
        whole = shard.unshard(out.detach())
        for row, outs in enumerate(logits):
            joined = torch.cat(outs, 1)[0].detach()
            torch.testing.assert_close(whole[row, : len(joined)], joined, rtol=1e-11, atol=1e-11)
            padding = whole[row, len(joined) :]
            assert name == "TRL" or not bool(padding.any())


def one_document(q, k, v):
    return attention(q[0], k[0], v[0], causal=True)[0][None]


CHECKS = {
    "thd": check_thd,
    "bottom_right": check_bottom_right,
    "flash_varlen": check_flash_varlen,
    "flash_dense": check_flash_dense,
    "training": check_training,
}


ON_FOUR = ("thd", "flash_varlen", "training")
ON_TWO = ("bottom_right", "flash_dense", "training")


def main() -> None:
    dist.init_process_group("gloo")
    start()
    rings = {4: dist.group.WORLD, 2: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")).get_group("cp")}
    for name, function in CHECKS.items():
        for size, mesh in rings.items():
            if name in (ON_FOUR if size == 4 else ON_TWO):
                function(mesh, Ring(mesh).rank, size)
                if dist.get_rank() == 0:
                    print("ok", name, size, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
