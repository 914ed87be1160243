"""The memory of a step of training, by a formula that is compared with measured rows (benchmarks/training/fits.py).

A model of transformers' Llama or Qwen3 form with AdamW, one row of tokens. Bytes a GPU:

- states: a replicated parameter takes 2 for its weight, 2 for its gradient, 4 for AdamW (bfloat16); under FSDP2 4, 4 and 8 divided
  by the GPUs (float32), and two gathered layers, the embedding and the head in bfloat16;
- held until the backward, a token: the input of each layer, and where attention is kept its output and LSE; of what is moved to the
  host, two layers' are on their way, and each tensor takes a power of two there. Without activation checkpointing all that a layer
  saves;
- the largest of three moments: the loss (no gradients yet; 4 bytes a logit; in chunks 12 of a chunk, and 8 a weight of the head),
  the backward of the last layer, and that of the first (all gradients);
- the largest moment of a layer's backward: the MLP, what precedes it, or attention, each beside what the layer has saved until
  there. In tiles the MLP's is that of a tile and its parameters' gradients, and norms save their inputs, not float32 copies. By
  groups of heads a call's copies and JAX's buffers (benchmarks/gpu.md) are those of a group;
- what torch's allocator reserves beyond its tensors, JAX's pool, and 2.5 GiB of contexts and NCCL's buffers.

Measured on GPUs: 12 and 36 layers of one width on two GPUs with whole logits, attention kept or computed again, and 12 layers
without checkpointing, which tell what a layer saves. Bytes of a layer's moments, of a tile and of a chunk are those of tensors that
were counted on a CPU. What is moved to the host, groups of heads, experts and other widths follow from sizes alone.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ring_attn.memory.shapes import Shapes

GIB = 2**30
CONTEXTS = 2.5 * GIB
RESERVED = 0.25  # by torch's allocator beyond tensors that come and go
AROUND = 0.3 * GIB  # what no row of any length was without
Groups = int | Literal["auto"]
Checkpoint = Literal["attention", "offload"] | None
POOL = 4 / 3  # JAX's, of what its buffers need


@dataclass(frozen=True)
class Levers:
    """As for ``context_parallel``."""

    checkpoint: Checkpoint = "attention"
    loss_chunk: int | None = None
    mlp_tile: int | None = None
    head_groups: Groups = 1
    offload_inputs: bool = False

    @property
    def groups(self) -> int:
        """One with "auto", which chooses where a model runs."""
        return self.head_groups if isinstance(self.head_groups, int) else 1


@dataclass(frozen=True)
class Setting:
    """``sharded``: by FSDP2 over all ``gpus``, weights in float32; else replicated, in bfloat16."""

    gpus: int
    sharded: bool = True
    checkpointing: bool = True
    levers: Levers = field(default_factory=Levers)


class Peak(NamedTuple):
    """Bytes. ``states``: weights, AdamW and what is gathered; ``held``: activations until their backward, or, where the first
    layer's backward is the largest moment, all gradients; ``work``: what comes and goes in the largest ``moment``; ``reserved``:
    beside tensors and JAX's pool, which is ``ring``."""

    states: float
    held: float
    work: float
    moment: str
    ring: float
    reserved: float
    host: float

    @property
    def tensors(self) -> float:
        """Torch's, at their peak."""
        return self.states + self.held + self.work

    @property
    def device(self) -> float:
        """What is taken of the GPU."""
        return self.tensors + self.ring + self.reserved


def peak(shapes: Shapes, setting: Setting, tokens: int) -> Peak:
    """With ``tokens`` on each GPU."""
    levers = setting.levers
    states, gradients = _states(shapes, setting)
    resident, host = _held(shapes, setting, tokens)
    layer = max(_mlp(shapes, levers, tokens), *_before_the_mlp(shapes, levers, tokens))
    moments: dict[str, tuple[float, float]] = {
        "loss": (resident, _loss(shapes, levers, tokens)),
        "last layer": (resident, layer),
        "first layer": (gradients, layer),
    }
    moment = max(moments, key=lambda name: sum(moments[name]))
    resident, work = moments[moment]
    goes = resident + work if setting.checkpointing else work
    return Peak(states, resident, work, moment, _ring(shapes, levers, tokens), RESERVED * goes + CONTEXTS, host)


def _states(shapes: Shapes, setting: Setting) -> tuple[float, float]:
    """What is there all the time, and the gradients."""
    if not setting.sharded:
        return (2 + 4) * shapes.parameters + AROUND, 2 * shapes.parameters
    weights, gradients, moments = (each * shapes.parameters / setting.gpus for each in (4, 4, 8))
    gathered = 2 * (2 * shapes.of_a_layer + shapes.of_the_ends)
    return weights + moments + gathered + AROUND, gradients


def _held(shapes: Shapes, setting: Setting, tokens: int) -> tuple[float, float]:
    """On the GPU, and on the host."""
    if not setting.checkpointing:
        return tokens * shapes.layers * (_saved(shapes) + 8 * shapes.width), 0
    levers, inputs = setting.levers, (2 * shapes.hidden,)
    attention = (2 * shapes.heads * shapes.dim, 4 * shapes.heads) if levers.checkpoint else ()
    moved = (*inputs * levers.offload_inputs, *attention * (levers.checkpoint == "offload"))
    stays = sum(inputs) + sum(attention) - sum(moved)
    host = shapes.layers * sum(_pinned(tokens * each) for each in moved)
    return tokens * (shapes.layers * stays + 2 * sum(moved)), host


def _pinned(nbytes: int) -> int:
    """A block of pinned memory, as torch's allocator rounds it up."""
    return 1 << (nbytes - 1).bit_length()


def _loss(shapes: Shapes, levers: Levers, tokens: int) -> float:
    around, weights = tokens * 16 * shapes.hidden, shapes.hidden * shapes.vocabulary
    if levers.loss_chunk is None:
        return around + tokens * 4 * shapes.vocabulary
    return around + min(levers.loss_chunk, tokens) * 12 * shapes.vocabulary + 8 * weights


def _saved(shapes: Shapes, in_tiles: bool = False) -> int:
    """Of a token by a layer, without the inside of its MLP: q, k, v, attention's output, norms (also of q and k) in float32, or in
    tiles their inputs."""
    query, key = shapes.heads * shapes.dim, shapes.kv_heads * shapes.dim
    return 6 * shapes.hidden + 6 * (query + key) if in_tiles else 16 * shapes.hidden + 10 * (query + key)


def _in_tiles(levers: Levers, tokens: int) -> bool:
    return levers.mlp_tile is not None and levers.mlp_tile < tokens


def _mlp(shapes: Shapes, levers: Levers, tokens: int) -> float:
    in_tiles = _in_tiles(levers, tokens)
    around = _saved(shapes, in_tiles) + 3 * shapes.hidden
    of_a_token = 12 * shapes.width + 8 * shapes.per_token * shapes.hidden
    if levers.mlp_tile is None or not in_tiles:
        return tokens * (around + of_a_token)
    return tokens * around + levers.mlp_tile * of_a_token + 6 * shapes.of_an_mlp


def _before_the_mlp(shapes: Shapes, levers: Levers, tokens: int) -> tuple[float, float]:
    """The backward of the norm, and of attention: transformers' q, k and v are copied, as they are in another order of memory."""
    query, key, hidden = shapes.heads * shapes.dim, shapes.kv_heads * shapes.dim, shapes.hidden
    copies = 2 * (3 * query + 2 * key) / levers.groups
    in_tiles = _in_tiles(levers, tokens)
    norm, of_heads = (6, 10) if in_tiles else (18, 14)
    return tokens * (_saved(shapes, in_tiles) + norm * hidden), tokens * (8 * hidden + of_heads * (query + key) + copies)


def _ring(shapes: Shapes, levers: Levers, tokens: int) -> float:
    """dQ in float32; K/V in use and arriving; dK/dV that leave, arrive and are made, in float32."""
    buffers = 4 * shapes.heads * shapes.dim + (8 + 16 + 8) * shapes.kv_heads * shapes.dim
    return POOL * tokens * buffers / levers.groups
