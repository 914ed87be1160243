"""``context_parallel``: a transformers model whose sequence is sharded over a ring."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from jax_core.masks.layout import Layout
from ring_attn.generation.cache import KVCache
from ring_attn.integrations.transformers.batch.given import CHANGED, check_given, check_labels, taken
from ring_attn.integrations.transformers.batch.head import Head, Outputs, first_tokens
from ring_attn.integrations.transformers.batch.loss import InChunks, logits_of, loss_of, with_loss, without_logits
from ring_attn.integrations.transformers.batch.outputs import without_pooled
from ring_attn.integrations.transformers.batch.sharding import MARK, Inputs, ModelInputs, shard_batch
from ring_attn.integrations.transformers.calls import CALL, Call, Entered, Sharded
from ring_attn.integrations.transformers.generation.cache import RingCache, cache_in
from ring_attn.integrations.transformers.generation.generate import generate_on_ring
from ring_attn.integrations.transformers.layers.attention import NAME, register
from ring_attn.integrations.transformers.layers.kernels import Operators, check_operators
from ring_attn.integrations.transformers.model.checkpointing import check_checkpoint, keep_in_checkpoints, keep_no_more
from ring_attn.integrations.transformers.model.description import described
from ring_attn.integrations.transformers.model.head_groups import HeadGroups
from ring_attn.integrations.transformers.model.patches import Patches
from ring_attn.integrations.transformers.model.plan import plan_of, pretrained_model
from ring_attn.integrations.transformers.model.tiles import check_tiles, tiles_of
from ring_attn.integrations.transformers.sequence import Sequence
from ring_attn.integrations.transformers.verify.verification import Batch, LossOf, Verdict, verify
from ring_attn.integrations.transformers.versions import ModelOutput
from ring_attn.memory import Levers
from ring_attn.memory.formula import Checkpoint, Groups
from ring_attn.packed.ring import placing
from ring_attn.ring import BUCKETS, Ring, as_ring
from ring_attn.sharding.marks import is_shard
from ring_attn.training.chunked_loss import CHUNK
from ring_attn.training.early_sums import early_sums
from ring_attn.training.gradients import check_overlap, reduced_by_ddp, refuse_reduced_by_ddp, sync_gradients
from ring_attn.training.shared_state import SharedState
from torch_bridge.call.counting import ON_CALL
from torch_bridge.mesh.rings import MeshDim, MeshLike
from torch_bridge.tracing import untraced


class ContextParallel:
    """A model whose sequence is sharded over ``ring``: made by :func:`context_parallel`."""

    def __init__(
        self,
        model: nn.Module,
        ring: Ring,
        levers: Levers | None = None,
        overlap: bool = False,
        place_documents: bool | None = False,
        operators: Operators | None = None,
    ) -> None:
        levers = levers or Levers()
        check_checkpoint(levers.checkpoint)
        check_operators(operators)
        self.model, self.levers, self.overlap = pretrained_model(model), levers, overlap
        self.plan, self._operators = plan_of(self.model), operators
        self.plan.check_layout(ring)
        self.ring = ring = placing(ring, place_documents, self.plan.against_any_order)
        self._groups = HeadGroups(self.model, ring, levers)
        self._head = None if levers.loss_chunk is None else Head(self.plan, levers.loss_chunk)
        self._tiles = {} if levers.mlp_tile is None else tiles_of(self.model, self.plan.config, levers.mlp_tile)
        self.previous: str = self.plan.config._attn_implementation
        if self.previous == NAME:
            raise ValueError("this model is context-parallel already; call remove() of its ContextParallel first")
        self._outer, self._entered, self._off = model, [], False  # type: tuple[nn.Module, list[Entered], bool]
        self._shared = SharedState(ring)
        self._reduced_by_ddp = False
        self._hooks: list[RemovableHandle] = []
        register()
        self._attach()

    def __repr__(self) -> str:
        """In lines, to be printed. It communicates nothing, so it may be asked on one rank."""
        return described(self.plan, self.ring, self.levers.checkpoint, self._operators, bool(self._hooks))

    def _attach(self) -> None:
        entrances = list(dict.fromkeys((self.model, self.plan.base)))
        forwards = {module: self._through_hooks(module) for module in entrances}
        self._patches = Patches(self.plan, self.ring, self, {**forwards, **self._tiles})
        for module in entrances:
            self._hooks.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            # The loss is made before FSDP's hook, which shards the head's parameters and waits for the backward of what it sees.
            first = module is self.model
            self._hooks.append(module.register_forward_hook(self._leave, with_kwargs=True, always_call=True, prepend=first))

    def shard(self, batch: Batch) -> ModelInputs:
        """This rank's part of a whole batch, the same on every rank, as any data collator makes it. No communication.

        Sequences are padded, to one of the ring's ``buckets``, so that few programs are compiled, and sharded; ``position_ids`` are
        global; ``labels`` (and ``shift_labels``, the same) are shifted first; ``num_items_in_batch`` is the number of labels of the
        whole ring, unless the batch has it (of all micro-batches, say). Padding, documents and what only masks read are kept whole,
        for the masks. For the model: ``model(**batch)``.

        Raises ValueError for an entry that is not known, NotImplementedError for one that cannot be honoured, each by name.
        """
        if MARK in batch:
            raise ValueError("this batch is sharded already")
        return shard_batch(self.plan, self.ring, self, batch)

    def __call__(self, **batch: object) -> Outputs:
        """The model's outputs for a whole batch, which is sharded here, or for one that :meth:`shard` made."""
        return self._outer(**(batch if MARK in batch else self.shard(batch)))

    def unshard(self, tensor: Tensor, batch: Batch, *, dim: int = 1) -> Tensor:
        """The whole of what the model made of a ``batch`` of :meth:`shard`, something for each token along ``dim``: in the order of
        the batch, without padding, on every rank. Collective and differentiable as :func:`ring_attn.unshard`."""
        sharded = batch.get(MARK)
        if not isinstance(sharded, Sharded):
            raise ValueError("cp.unshard needs the batch that cp.shard made, whose order it restores")
        sequence = sharded.sequences["decoder"]
        return sequence.ring.unshard(tensor, dim=dim, length=sequence.length)

    def loss(self, outputs: Outputs | Tensor, batch: Mapping[str, Any]) -> Tensor:
        """The loss of a model's outputs, or of its logits, for a batch that :meth:`shard` made: the mean over all labels of the
        ring, with this rank's part of the gradient. ``model(**batch).loss`` is the same. Of the base model's outputs
        (``model.model(**batch)``) the logits are made ``loss_chunk`` tokens at a time, 1,024 by default. Collective."""
        sharded = batch.get(MARK)
        if not isinstance(sharded, Sharded) or "labels" not in batch:
            raise ValueError("cp.loss needs the batch that cp.shard made, with labels")
        check_labels(self.plan, sharded, {"labels": batch["labels"]})
        self._check_entries(sharded, {"labels": batch["labels"]})
        items = batch.get("num_items_in_batch", sharded.items)
        chunks = None
        hidden = getattr(outputs, "last_hidden_state", None)
        if hidden is not None and not hasattr(outputs, "logits"):
            chunks = InChunks(self._head or Head(self.plan, CHUNK), hidden)
        with self._by_itself():
            return loss_of(self.plan, self.ring, outputs, batch["labels"], sharded, items, chunks)

    def reduce_gradients(self) -> None:
        """Sums the gradients of the parameters over the ring, once, after the last ``backward()`` before the optimizer's step.

        It is :func:`ring_attn.sync_gradients`, which refuses FSDP and DDP over ranks of the ring: they take a mean over them
        already, so there ``(outputs.loss * ranks of that mean).backward()`` is all.
        """
        self._shared.settle()
        if self._reduced_by_ddp:
            refuse_reduced_by_ddp()
        sync_gradients(self._outer, ring=self.ring, overlap=self.overlap)

    def remove(self) -> None:
        """Makes the model what it was before; what was changed in its configuration since stays. Harmless if called twice."""
        self._detach()
        for sums in early_sums(self._outer.parameters()):
            sums.stop()

    def _detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._patches.undo()
        keep_no_more(self._outer)

    @contextmanager
    def detached(self) -> Iterator[None]:
        """The model as it was before, for a while."""
        self._detach()
        try:
            yield
        finally:
            self._attach()

    def verify(self, batch: Batch, *, loss: LossOf | None = None) -> Verdict:
        """Compares this model on the ring with the same model in one process, in float32 and without dropout, on a short whole
        ``batch`` with labels, the same on all ranks: the loss, the logits, each parameter's gradient, and whether packed documents
        see each other. Collective. Neither the model nor its gradients are changed. Layers with a state are computed by plain JAX.

        Each process holds a float32 copy of the model and its activations; of a model above 2 GiB, or in shards (FSDP), one with
        fewer layers of the same kinds and random weights. ``loss(outputs, sharded batch)``: this rank's share; None: the model's.

        ``print(cp.verify(batch))`` says what is wrong, the first layer that differs, and why as far as can be told; ``.ok`` is for
        tests. In one process transformers' own attention is the measure. Where that lets packed documents see each other, as for
        models that give their masks no position ids, the measure is each document by itself, of which only the logits are compared.

        Raises ValueError for a batch without labels, and what :meth:`shard` and the model raise.
        """
        levers = replace(self.levers, loss_chunk=None)  # logits are compared
        return verify(self, batch, loss, lambda twin: ContextParallel(twin, self.ring, levers, operators={}))

    def cache(self, max_length: int, *, at_once: int = 8) -> RingCache:
        """An empty cache, spread over the ring, to be given to ``model.generate`` or the model as ``past_key_values``.
        ``max_length``, ``at_once``: as of :class:`ring_attn.generation.KVCache`. In a loop of your own, without gradients:
        ``model(**cp.shard(prompt), past_key_values=cache)`` keeps the prompt's keys and has no logits; then ``model(input_ids=new,
        past_key_values=cache)`` takes new tokens, the same on every rank. NotImplementedError for a model that it cannot serve."""
        self.plan.check_cache()
        return RingCache(self, self.model, bool(self.plan.states), KVCache(self.ring, max_length, at_once))

    def generate(self, *arguments: object, **options: object) -> ModelOutput | Tensor:
        """The model's own ``generate`` on a whole prompt; ``model.generate`` is this. With ``past_key_values=cp.cache(...)`` it
        goes over the ring, with the same tokens on all ranks; without, each rank uses the model's own attention, by itself."""
        if MARK in options or any(is_shard(x) for x in (*arguments, *options.values())):
            raise ValueError(
                "generate takes the whole prompt, and this one is sharded: call model.generate(input_ids) with the unsharded "
                "prompt, and past_key_values=cp.cache(max_length) to have its keys spread over the ring"
            )
        generate, cache = partial(type(self.model).generate, self.model), cache_in(options)
        if cache is not None:
            return generate_on_ring(generate, self._prefill, cache, self.plan, arguments, options)
        with self._patches.undone(), self._by_itself():
            return generate(*arguments, **options)

    def _prefill(self, batch: dict[str, Tensor], cache: RingCache) -> None:
        sharded = self.shard(batch)
        sequences: dict[str, Sequence] = sharded[MARK].sequences
        # Another token follows at once, which rotary embeddings that go by the longest position see.
        sequences["decoder"] = replace(sequences["decoder"], highest=sequences["decoder"].highest + 1)
        self._outer(**sharded, **{self.plan.cache_name: cache})

    @contextmanager
    def _by_itself(self) -> Iterator[None]:
        """The model's forwards as they were before, for a while."""
        before, self._off = self._off, True
        try:
            yield
        finally:
            self._off = before

    def _through_hooks(self, module: nn.Module) -> Callable[..., object]:
        """Some wrappers (PEFT's older releases) call ``model.forward``, past the hooks."""
        forward = module.forward

        @wraps(forward)
        def through(*arguments: object, **options: object) -> object:
            # The hooks would have taken the mark out, and entered this module last.
            came_by_them = MARK not in options and self._entered and self._entered[-1].module is module
            if not (self._off or came_by_them):
                return module(*arguments, **options)
            try:
                return forward(*arguments, **options)
            except Exception:
                raise
            except BaseException:  # an interrupt, after which torch calls no hook
                self._leave(module, (), {}, None)
                raise

        return through

    @property
    def off(self) -> bool:
        """Whether the model runs as it did before."""
        return self._off

    @property
    def operators(self) -> Operators | None:
        """As they were given."""
        return self._operators

    @untraced
    def _enter(self, module: nn.Module, arguments: tuple[object, ...], options: ModelInputs) -> Inputs | None:
        if self._off:
            return None
        sharded = options.pop(MARK, None)
        # Inside the whole model's forward the base model's is a part of it. Not so with a sharded batch of its own: then the whole
        # model's call was lent to another function, as TRL does to have a loss made inside DDP's forward.
        part = sharded is None and module is not self.model and bool(self._entered)
        self._entered.append(Entered(module) if part else self._begin(module, sharded, options))
        return arguments, options

    def _begin(self, module: nn.Module, sharded: Sharded | None, options: ModelInputs) -> Entered:
        labels, items, cache, groups = None, None, cache_in(options), self.levers.groups
        if sharded is not None:
            if sharded.owner is not self:
                raise ValueError("the batch was sharded by another ContextParallel than that of this model; use its own cp.shard")
            check_given(self.plan, sharded, options)
            self._check_entries(sharded, options)
            given = options[next(iter(sharded.entries))]
            if torch.is_grad_enabled():
                self._reduced_by_ddp = reduced_by_ddp(self.ring)
                check_overlap(self.overlap)
                keep_in_checkpoints(self._outer, self.levers)
            check_tiles(self.model, self._tiles, options)
            labels, items, groups = *taken(sharded, options), self._groups.of(given)
            if cache is not None:
                cache.begin_prompt(self, sharded.sequences["decoder"], labels)
            self._shared.compare(sharded.whole, given, self.model, items)
        elif cache is not None:
            cache.begin_new(self, options)
        call = Call(self.ring, self.previous, sharded, self.plan.whole_encoder is not None, groups, cache)
        # Without the head, which is the caller's, there is no loss to be made.
        return Entered(module, (call, CALL.set(call), ON_CALL.set(call.count)), labels if module is self.model else None, items)

    def _check_entries(self, sharded: Sharded, given: Batch) -> None:
        """Foreign entries are compared on their device, which nobody waits for."""
        for name in sharded.entries:
            tensor = given.get(name)
            changed = sharded.changed(name, tensor) if isinstance(tensor, Tensor) else None
            if changed is not None:
                self._shared.ask({f"{name} of a sharded batch is not what cp.shard made": CHANGED}, changed.view(1))

    @untraced
    def _leave(self, module: nn.Module, arguments: object, options: object, output: Outputs | None) -> Outputs | None:
        if self._off or not self._entered or self._entered[-1].module is not module:  # it was refused before it had entered
            return None
        _, begun, labels, items, hidden = self._entered.pop()
        if begun is None:
            return self._without_logits(output)
        call, of_call, of_listener = begun
        CALL.reset(of_call)
        ON_CALL.reset(of_listener)
        if call.cache is not None:
            return self._leave_cache(call.cache, call, output, head=module is self.model)
        if output is None or call.sharded is None:  # None: an error is on its way
            return None
        self.plan.check_attended(call.attended, call.head_groups)
        if self.ring.size > 1:
            output = without_pooled(output, call.sharded.sequences)
        if labels is None:
            return output
        chunks = None if self._head is None or hidden is None else InChunks(self._head, hidden)
        with self._by_itself():
            if chunks is not None:
                chunks.head.check(chunks.hidden, logits_of(output))
            loss = loss_of(self.plan, self.ring, output, labels, call.sharded, items, chunks)
        return with_loss(output, loss, logits=chunks is None)

    def _leave_cache(self, cache: RingCache, call: Call, output: Outputs | None, head: bool) -> Outputs | None:
        """Logits of a prompt's shard are of no use to anybody, so there are none."""
        cache.running = False
        if output is None:
            return None
        self.plan.check_attended(call.attended, 1 if call.decoding else call.head_groups)
        cache.end(logits_of(output) if call.decoding and head else None)
        return output if call.decoding or not head else without_logits(output)

    def _without_logits(self, output: Outputs | None) -> Outputs | None:
        """A base model's output in the whole model's forward. Where the loss is made in chunks, or a cache is filled, the head gets
        few tokens of it."""
        whole = self._entered[-1] if self._entered else None
        if output is None or whole is None or whole.begun is None:
            return None
        call = whole.begun[0]
        if (call.cache is None or call.decoding) and (self._head is None or whole.labels is None):
            return None
        first, hidden = first_tokens(output)
        self._entered[-1] = whole._replace(hidden=hidden)
        return first


def context_parallel(
    model: nn.Module,
    mesh: MeshLike = None,
    *,
    mesh_dim: MeshDim = None,
    layout: Layout = "zigzag",
    buckets: int = BUCKETS,
    checkpoint: Checkpoint = "attention",
    overlap: bool = False,
    loss_chunk: int | None = None,
    mlp_tile: int | None = None,
    head_groups: Groups = 1,
    offload_inputs: bool = False,
    place_documents: bool | None = False,
    operators: Operators | None = None,
    ring: Ring | None = None,
) -> ContextParallel:
    """Shards the sequence of a transformers model over a ring. The model is changed in place; ``remove()`` undoes it.

    ```
    cp = context_parallel(model, mesh)
    loss = model(**cp.shard(batch)).loss
    loss.backward(); cp.reduce_gradients()
    ```

    Args:
        model: a transformers model, or one that wraps it (PEFT, DistributedDataParallel, FSDP).
        mesh, mesh_dim, layout, or ring: as for :func:`ring_attn.ring_attention`.
        buckets: how many lengths an octave batches are padded to (:class:`ring_attn.Ring`); 0 pads only as the layout needs it.
        checkpoint: what becomes of attention under activation checkpointing, if that is on. "attention": output and LSE are kept,
            ``heads * (value_dim * bytes + 4)`` bytes a token and layer, and no attention is computed twice. "offload": the same in
            pinned host memory, on its way while other layers compute. None: computed again, as all of a layer.
        overlap: whether gradients are summed while the backward runs, as for :func:`ring_attn.sync_gradients`; ``reduce_gradients``
            then waits for what is left. Not for FSDP and DistributedDataParallel, which reduce gradients by themselves.
        loss_chunk: ``model(**batch).loss`` is made of this many tokens' logits at a time (1,024, say), which never exist as a
            whole: the outputs then have no logits. None: of all at once, which the outputs have.
        mlp_tile: MLPs, experts and norms compute this many of a rank's tokens at a time (:func:`ring_attn.tiled`). None: all.
        head_groups: attention runs in so many groups of K/V heads, one after another; "auto": as few as fit, by ``memory.peak``.
        offload_inputs: under activation checkpointing the inputs of layers wait in pinned host memory, too.
        place_documents: a batch of one row of several documents, as packing and flattening collators make it, lies on the ring as
            :func:`ring_attn.shard_packed` places it, so that all ranks have nearly equal work; ``layout`` is for all others.
            ``cp.unshard(tensor, batch)`` restores the order. ``cp.ring``, which shards tensors of your own, does not know it, so by
            default nothing is placed. For decoders that take ``position_ids``; None: for these, and no others.

        operators: what computes a rank's tokens in layers with a state, by the names of ring_attn's functions:
            ``{"gated_delta_rule": chunk_gated_delta_rule}``; of one that is not among them, plain JAX. None: fla's and mamba_ssm's
            where they are installed, for 16 bits on GPUs (docs/hybrids.md).

    Raises NotImplementedError, by name of layer and reason, for a model that cannot be sharded; ValueError for no transformers
    model and for one that is context-parallel already.
    """
    where = as_ring(ring, mesh, mesh_dim, "contiguous" if ring is not None else layout, buckets)
    levers = Levers(checkpoint, loss_chunk, mlp_tile, head_groups, offload_inputs)
    return ContextParallel(model, where, levers, overlap, place_documents, operators)
