"""One rank of the tests of ``replace_attention``. Run by tests/ring_attn/test_replace.py under torch.distributed.run.

Outputs, input gradients and parameter gradients (summed over the ring) of torch's encoder and decoder on shards must be those of
the same model on the whole sequence in one process.
"""

import torch
from torch import nn

from ring_attn import Ring, replace_attention, sync_gradients
from tests.support.healthy import gloo_world

EMBED, HEADS, SOURCE, TARGET = 8, 2, 12, 16


def noise(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(actual, expected, name):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, msg=lambda text: f"{name}: {text}")


def made(kind):
    torch.manual_seed(0)
    sizes = dict(d_model=EMBED, nhead=HEADS, dim_feedforward=16, dropout=0.0, batch_first=True, dtype=torch.float64)
    if kind == "encoder":
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(**sizes), 2)
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(**sizes), 2)


def run(model, inputs, masks, upstream):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = model(*inputs, **masks)
    (out * upstream).sum().backward()
    return out.detach(), [x.grad for x in inputs]


def causal(length):
    return nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64)


def padding(length, *padded):
    mask = torch.zeros(2, length, dtype=torch.bool)
    mask[1, list(padded)] = True
    return mask


def cases(ring):
    """Name, model, masks for one process, and masks for this rank."""
    rows = noise(TARGET, TARGET, seed=1)
    rows = rows.masked_fill(rows > 1, float("-inf"))
    source, target = padding(SOURCE, 10, 11), padding(TARGET, 0, 15)
    crossed = noise(TARGET, SOURCE, seed=2) > 1
    one = {"is_causal": True}
    yield "plain encoder", "encoder", {}, {}
    yield "causal encoder", "encoder", {"mask": causal(TARGET), **one}, one
    yield "masked rows", "encoder", {"mask": rows}, {"mask": ring.shard(rows, dim=-2)}
    yield "padding", "encoder", {"src_key_padding_mask": target}, {"src_key_padding_mask": ring.shard(target)}
    yield (
        "decoder",
        "decoder",
        {"tgt_mask": causal(TARGET), "tgt_is_causal": True, "memory_key_padding_mask": source, "memory_mask": crossed},
        {
            "tgt_mask": ring.shard(causal(TARGET), dim=-2),
            "memory_key_padding_mask": ring.shard(source),
            "memory_mask": ring.shard(crossed, dim=-2),
        },
    )
    yield "causal decoder", "decoder", {"tgt_mask": causal(TARGET), "tgt_is_causal": True}, {"tgt_is_causal": True}


def check(ring, name, kind, masks, own_masks):
    x, memory, upstream = (noise(2, length, EMBED, seed=length + seed) for length, seed in ((TARGET, 3), (SOURCE, 4), (TARGET, 5)))
    inputs = [x] if kind == "encoder" else [x, memory]
    reference, model = made(kind), made(kind)
    expected, expected_gradients = run(reference, inputs, masks, upstream)
    swapped, left = replace_attention(model, ring=ring)
    assert len(swapped) == 2 * len(inputs) and not left, (swapped, left)
    out, gradients = run(model, [ring.shard(x) for x in inputs], own_masks, ring.shard(upstream))
    close(out, ring.shard(expected), name)
    for actual, whole in zip(gradients, expected_gradients, strict=True):
        close(actual, ring.shard(whole), name)
    sync_gradients(model, ring=ring)
    for parameter, (label, whole) in zip(model.parameters(), reference.named_parameters(), strict=True):
        close(parameter.grad, whole.grad, f"{name}, {label}")


def check_refusals(ring):
    """A mask made for the local length, or whole, is caught."""
    model, x = made("encoder"), ring.shard(noise(2, TARGET, EMBED, seed=6))
    replace_attention(model, ring=ring)
    for length in (x.shape[1], TARGET):
        try:
            model(x, mask=causal(length))
        except ValueError as error:
            assert "attn_mask must be (8, 16)" in str(error), error
        else:
            raise AssertionError(f"a mask of {length} x {length} was not refused")


def main():
    with gloo_world("replace"):
        ring = Ring(layout="zigzag")
        for case in cases(ring):
            check(ring, *case)
        local = Ring("local")
        for case in cases(local):
            check(local, *case)
        check_refusals(ring)


if __name__ == "__main__":
    main()
