"""Outputs that a model made of a token which one rank has: not to be had from a shard."""

from typing import NoReturn

from torch import Tensor

from ring_attn.integrations.transformers.batch.head import Outputs
from ring_attn.integrations.transformers.sequence import Sequence

_POOLED = ("pooler_output", "mc_logits", "text_embeds", "sentence_embedding")


class OfOneToken:
    """In the place of an output that is one vector for each entry of the batch: any use of it raises NotImplementedError."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self) -> NoReturn:
        raise NotImplementedError(
            f"{self._name} is made of a token that one rank has (the first, the last, or where the highest id is), and each rank "
            "would make it of another: make it yourself of hidden states of the whole sequence, "
            "cp.unshard(outputs.last_hidden_state, batch)"
        )

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):  # copy and pickle ask for these
            raise AttributeError(attribute)
        self._refuse()

    @classmethod
    def __torch_function__(
        cls, function: object, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> NoReturn:
        instances = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, cls)]
        (instances[0] if instances else cls("a pooled output"))._refuse()


def without_pooled(output: Outputs, sequences: dict[str, Sequence]) -> Outputs:
    """A model's outputs with :class:`OfOneToken` in the place of what is no number or vector for each token of a shard."""
    if isinstance(output, tuple):
        return tuple(OfOneToken(f"output {at}") if _pooled(str(at), x, sequences) else x for at, x in enumerate(output))
    if hasattr(output, "items"):
        for name in [name for name, value in output.items() if _pooled(name, value, sequences)]:
            output[name] = OfOneToken(f"the output {name}")
    return output


def _pooled(name: str, value: object, sequences: dict[str, Sequence]) -> bool:
    """By its name, or its shape ``[batch, ...]`` that is not ``[batch, local, ...]``. What an encoder returns may be whole."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or name.startswith("encoder_"):
        return False
    decoder = sequences["decoder"]
    lengths = {x.local for x in sequences.values()}
    return name in _POOLED or (value.ndim == 2 and value.shape[0] == decoder.batch and value.shape[1] not in lengths)
