"""``RingCache``: a :class:`ring_attn.generation.KVCache` as transformers' models and ``generate`` take it, ``past_key_values``."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ring_attn.functional import AttentionOptions
from ring_attn.generation.cache import KVCache
from ring_attn.generation.checks import check_new_tokens, reach_of
from ring_attn.integrations.transformers.sequence import Sequence
from ring_attn.integrations.transformers.versions import Cache, DynamicCache, PreTrainedModel
from ring_attn.sharding.reduction import of_rank_0, sum_over_ring

NAMES = ("past_key_values", "cache_params")  # what models call their cache


def cache_in(options: Mapping[str, object]) -> "RingCache | None":
    """That among a model's inputs."""
    return next((x for name in NAMES if isinstance(x := options.get(name), RingCache)), None)


class RingCache(Cache):
    """What a context-parallel model has seen, spread over the ranks of its ring: made by :meth:`ContextParallel.cache`.

    Layers attend through it, so :meth:`update` only hands on; states of layers that carry one are small and whole on every rank, in
    transformers' own cache layers. ``seen``: how many tokens a row has, padding among them; ``mask``:
    bool ``[batch, seen]``, False on padding, or None. ``generating``: whether ``generate`` of
    :mod:`ring_attn.integrations.transformers.generation.generate` runs; ``ids [batch, seen]``: the tokens, where it knows them.
    ``running``: whether a forward of its model is under way: to others it would give the new keys alone.
    """

    is_compileable = False

    def __init__(self, owner: object, model: PreTrainedModel, with_states: bool, kv: KVCache) -> None:
        super().__init__(layers=[])
        self.owner, self.kv, self._model, self._with_states = owner, kv, model, with_states
        self.seen, self.mask, self.ids = 0, None, None  # type: int, Tensor | None, Tensor | None
        self.generating = self.running = False
        self._whole: int | None = None  # tokens that generate was given, until its first forward
        self._prompt = self._coming = 0  # tokens of the prompt, and of the forward under way
        # Of this rank's part of the prompt: positions, segments; and how many tokens from the row's end each is.
        self._ids: tuple[Tensor, Tensor] | None = None
        self._to_end: Tensor | None = None
        self._empty_states()

    @property
    def settings(self) -> object:
        """The model's own for ``generate``."""
        return getattr(self._model, "generation_config", None)

    def __repr__(self) -> str:
        return f"RingCache({self.seen} of {self.kv.max_length} tokens, {len(self.kv.layers)} layers, {self.kv.nbytes} bytes here)"

    @property
    def device(self) -> torch.device:
        return self._model.device

    @contextmanager
    def generated(self, whole: Tensor) -> Iterator[None]:
        """While ``generate`` runs, which was given ``whole [batch, seq]``."""
        self._whole, self.generating, self.ids = whole.shape[1], True, whole[:, : self.seen or whole.shape[1] - 1]
        try:
            yield
        finally:
            self._whole, self.generating = None, False

    def end_at(self, sequences: Tensor) -> None:
        """After ``generate``: a ring that had ended before others of its job, under FSDP, has gone on with them."""
        beyond = self.seen - (sequences.shape[1] - 1)
        if beyond > 0 and self._with_states:
            self.reset()
        elif beyond > 0:
            self.crop(-beyond)

    # A forward of the model.

    def begin_prompt(self, owner: object, sequence: Sequence, labels: Tensor | None) -> None:
        """Before a forward on a sharded prompt."""
        self._check_forward(owner)
        if self.seen:
            raise ValueError(
                f"this cache has had its prompt and holds {self.seen} tokens: give the model new tokens whole, as "
                "model.generate does, or make another with cp.cache"
            )
        if sequence.documents is not None or labels is not None:
            what = "labels" if labels is not None else "several documents in a row"
            raise NotImplementedError(f"a prompt for a cache cannot have {what}: give a batch of prompts, without labels")
        if sequence.length > self.kv.max_length:
            raise ValueError(
                f"the prompt has {sequence.length} tokens, more than the cache's max_length={self.kv.max_length}: make a larger one"
            )
        self.reset()
        # Positions count from each row's first token, as chunks do; for windows it is all the same.
        left = torch.zeros(sequence.batch, dtype=torch.int64, device=sequence.device) if sequence.left is None else sequence.left
        self.kv.begin(sequence.length - left)
        unseen = torch.arange(sequence.padded, device=sequence.device) >= sequence.length
        hidden = unseen if sequence.hidden is None else unseen | sequence.hidden
        places = sequence.ring.positions(sequence.padded, device=sequence.device)
        positions, self._to_end = places - left[:, None], sequence.length - places
        self._ids = positions, sequence.ring.shard(sequence.zeros().masked_fill(hidden, -1))
        self._prompt = self._coming = sequence.length
        self.running = True
        self.mask = None if sequence.hidden is None else ~sequence.hidden[:, : sequence.length]

    def begin_new(self, owner: object, inputs: dict[str, Any]) -> None:
        """Before a forward on new tokens, the same on all ranks. ``inputs``: the model's inputs, by name."""
        self._check_forward(owner)
        self._ids = self._to_end = None
        self._cut(inputs)
        tokens = inputs.get("input_ids") if inputs.get("input_ids") is not None else inputs.get("inputs_embeds")
        if not isinstance(tokens, Tensor):
            raise ValueError(
                "a model with a cache of cp.cache must be given new tokens by name, input_ids=[batch, tokens]; got none"
            )
        batch, self._coming = tokens.shape[:2]
        if not self.seen and not self.generating:
            raise ValueError(
                "the cache of cp.cache is empty: call model.generate(prompt, past_key_values=cache), which fills it, or "
                "model(**cp.shard(prompt), past_key_values=cache) first"
            )
        if set(self.kv.counts().values()) - {self.seen - self._prompt}:
            raise ValueError(
                "an earlier forward with this cache ended half way, and some layers have its tokens: call cache.reset() and give "
                "the prompt again"
            )
        if not self.seen:
            self._empty_states()
            self.kv.begin(torch.zeros(batch, dtype=torch.int64, device=tokens.device))
            self.ids = tokens[:, :0] if self.generating else None
        self._repeat(batch)
        check_new_tokens(self.kv.layers, self.seen - self._prompt, self._coming, self._prompt, self.kv.max_length)
        self._check_mask(inputs.get("attention_mask"))
        self._note(inputs.get("input_ids"))
        if inputs.get("output_attentions"):
            raise NotImplementedError("output_attentions: no rank ever has the attention weights; leave it out")
        self.running = True

    def _cut(self, inputs: dict[str, Any]) -> None:
        """The first forward of generate may be given all tokens, as by prompt lookup, whatever the cache has."""
        tokens, whole = inputs.get("input_ids"), self._whole
        self._whole = None
        if whole is None or not isinstance(tokens, Tensor) or tokens.shape[1] < whole:
            return
        for name in ("input_ids", "position_ids"):
            if isinstance(inputs.get(name), Tensor):
                inputs[name] = inputs[name][..., self.seen :]

    def _note(self, tokens: Tensor | None) -> None:
        ids = self.ids
        if ids is not None and ids.shape[1] == self.seen:
            self.ids = None if tokens is None else torch.cat([ids, tokens.to(ids.device)], 1)

    def _repeat(self, batch: int) -> None:
        """As generate expands its inputs, for beams and several sequences of a prompt, after the prompt."""
        assert self.kv.lengths is not None
        prompts = len(self.kv.lengths)
        if batch != prompts and (batch % prompts or not self.generating):
            raise ValueError(f"the cache holds {prompts} prompts, and {batch} rows of new tokens came: one of each is needed")
        if batch != prompts:
            self.batch_repeat_interleave(batch // prompts)

    def _check_mask(self, mask: object) -> None:
        """A mask of keys must be that of the prompt, and of new tokens, which none may hide."""
        if mask is None and (self.mask is None or not self.kv.layers):  # a state has nothing to hide
            return
        whole = self.seen + self._coming
        if not isinstance(mask, Tensor) or mask.shape[1:] != (whole,):
            raise ValueError(
                f"attention_mask must be [batch, {whole}], of all tokens so far and the new ones, where the prompt was padded; got "
                f"{list(mask.shape) if isinstance(mask, Tensor) else mask}"
            )
        before = torch.ones_like(mask[:, : self.seen], dtype=torch.bool) if self.mask is None else self.mask
        now = mask.bool()
        if not bool(now[:, self.seen :].all()) or not torch.equal(now[:, : self.seen], before.expand_as(now[:, : self.seen])):
            raise ValueError(
                "attention_mask must be the prompt's, followed by 1 for each new token: what is in the cache keeps its padding, "
                "and new tokens have none"
            )

    def _check_forward(self, owner: object) -> None:
        if owner is not self.owner:
            raise ValueError("this cache was made by another ContextParallel than that of this model; use its own cp.cache")
        if torch.is_grad_enabled() and any(x.requires_grad for x in self._model.parameters()):
            raise ValueError("a KVCache keeps no gradients: run the model within torch.no_grad()")
        checkpointed = (getattr(module, "gradient_checkpointing", False) for module in self._model.modules())
        if self._with_states and self._model.training and any(checkpointed):
            raise NotImplementedError(
                "activation checkpointing takes the cache from layers with a state while a model trains: call model.eval() first"
            )

    def keep(self, module: nn.Module, key: Tensor, value: Tensor, options: AttentionOptions, named: str) -> None:
        """Keys and values of a layer's shard of the prompt, ``[batch, local, kv_heads, dim]``, as it attends with ``options``."""
        reason = _not_cached(options)
        if reason is not None:
            raise NotImplementedError(
                f"the attention of {named} {reason}, which a cache over a ring does not keep: call model.generate without "
                "past_key_values, on each rank by itself"
            )
        assert self._ids is not None
        self.kv.keep(self.kv.layer_of(module), key, value, *self._ids, reach_of(dict(options), self.kv.max_length))

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """A layer's attention of new tokens, ``[batch, tokens, heads, dim]``, to all that it has seen."""
        return self.kv.attend(self.kv.layer_of(module), query, key, value, **options)

    def end(self, logits: Tensor | None = None) -> None:
        """After a forward. The ``logits`` become rank 0's, so that all ranks choose the same tokens: they may differ in the last
        bits."""
        self._ids = self._to_end = None
        if self.mask is not None and self.mask.shape[1] < self.seen + self._coming:
            self.mask = nn.functional.pad(self.mask, (0, self._coming), value=True)
        self.seen += self._coming
        if logits is not None and self.generating and self.kv.ring.size > 1:
            logits.copy_(of_rank_0(logits.contiguous(), self.kv.ring.processes, "logits"))

    # What transformers asks of a cache.

    def __len__(self) -> int:
        return max(len(self.layers), len(self.kv.layers))

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        self._check_running()
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.kv.max_length

    get_max_cache_shape = get_max_length  # its older name

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        """``query_length``: older versions give the queries' positions."""
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.seen + new, 0

    def crop(self, tokens: int) -> None:
        """``-tokens`` new tokens are taken back, or, of a positive number, all but so many are."""
        self.check_croppable()
        seen = self.seen + tokens if tokens <= 0 else min(tokens, self.seen)
        self.kv.crop(seen - self._prompt)
        self.seen = seen
        self.mask, self.ids = (None if x is None else x[:, :seen] for x in (self.mask, self.ids))

    def check_croppable(self) -> None:
        if self._with_states:
            raise NotImplementedError("layers with a state take no token back: leave prompt_lookup_num_tokens out")

    def activate_past_recording(self) -> None:
        self.check_croppable()

    def grow(self, max_length: int) -> None:
        """Makes room for ``max_length`` tokens a row."""
        self.kv.grow(max_length)

    def _check_running(self) -> None:
        if not self.running:
            raise ValueError(
                "a cache of cp.cache serves the context-parallel model that it was made for, called itself: not another, nor this "
                "one after cp.remove() or within cp.detached(); leave it out there"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        assert self.kv.lengths is not None
        self.batch_select_indices(torch.arange(len(self.kv.lengths), device=self.kv.lengths.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        assert self.kv.lengths is not None
        if self.kv.layers:
            self.kv.reorder(indices.long())
        else:  # of a model whose layers all carry a state
            self.kv.begin(self.kv.lengths[indices])
        self.mask, self.ids = (None if x is None else x[indices.to(x.device)] for x in (self.mask, self.ids))
        for states in self._states():
            states.update({number: x.index_select(0, indices) for number, x in states.items() if x is not None})

    def reset(self) -> None:
        """Empties it, for another prompt."""
        self.kv = KVCache(self.kv.ring, self.kv.max_length, self.kv.at_once)
        self.seen, self.mask, self.ids, self._prompt = 0, None, None if not self.generating else self.ids, 0
        self._empty_states()

    # States.

    def _empty_states(self) -> None:
        self.layers = DynamicCache(config=self._model.config.get_text_config()).layers if self._with_states else []

    def _states(self) -> Iterator[dict[int, Tensor | None]]:
        for layer in self.layers:
            yield from (vars(layer)[name] for name in ("conv_states", "recurrent_states") if name in vars(layer))

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **settings: Any) -> Tensor:
        """``conv_states [batch, channels, tokens]``, inputs of a convolution; on a prompt this rank's, which go on to the
        ring, while the last of the whole are kept."""
        self._check_running()
        if self._to_end is None:
            return super().update_conv_state(conv_states, layer_idx, state_idx, **settings)
        last = self._last(conv_states, self._to_end, settings["conv_kernel_size"])
        super().update_conv_state(last, layer_idx, state_idx, **settings)
        return conv_states

    def _last(self, x: Tensor, to_end: Tensor, count: int) -> Tensor:
        """The last ``count`` of all ranks' ``x [batch, channels, local]``, 0 before the first."""
        target = x.new_zeros(*x.shape[:2], count + 1)  # the last takes what is left out
        target[:, :, torch.where((to_end > 0) & (to_end <= count), count - to_end, count)] = x
        ring = self.kv.ring.processes
        return sum_over_ring(target[..., :count], ring, "RingCache", f"the last inputs of a convolution, {list(x.shape[:2])}")


def _not_cached(options: AttentionOptions) -> str | None:
    if not options.get("causal"):
        return "is not causal"
    if options.get("mask_mod") is not None:
        return "goes by a mask function of its own"
    return "has a bias of positions" if options.get("bias") is not None else None
