"""What to do about those messages in docs/errors.md that do not say it themselves, by the message as the page has it."""

from collections.abc import Mapping

_ASIDE = "The file is set aside; `python -m tools.tune`, in a checkout, finds its configurations again."
_SHARD_THE_BATCH = "Shard the batch instead of the sequence, or take [a model that works](models.md)."

CURES: Mapping[str, str] = {
    # starting
    "it is nested too deeply": _ASIDE,
    "JAX cannot start on …": "Each rank's reason follows, with what to do.",
    "module … has no attribute …": "[JAX](jax.md) has the names.",
    "the cache folder …. Nothing is kept there; RING_ATTN_CACHE names another folder or turns caches off": (
        "Name a folder that is yours alone."
    ),
    "rank 0 could not start JAX's coordinator: …": "The reason follows; [several hosts](parallelism.md#several-hosts) need ports.",
    # meshes
    "HeadParallel splits the heads of a ring_attn.RingAttention, got …": "Name such modules in the plan of parallelize_module.",
    "in_specs has … as …, more dimensions than its shape …": "Give one entry for each dimension at most.",
    "the mesh has axes …; … is not among them": "Name the mesh's own axes in axis_name and in_specs.",
    # arguments
    "… can be differentiated once: JAX computes its gradients, and torch sees no further": (
        'For a second derivative call jax_core.ring_attention with platform="xla".'
    ),
    "calls on CPUs and GPUs can be explained, got one on …: jax_core.explain can": "Give jax_core.explain the shapes.",
    'strategy="…" is for tensors on a CPU or a GPU, and for JAX; on this device every tensor is split': "Leave strategy out.",
    "the mask function … uses …, which is not translated to JAX; known are …": "Write it with the operators that are listed.",
    "mask_mod takes positions of 32 bits: … has values from … to …": "Renumber them from 0.",
    # documents
    "… is …, but a document has … tokens": "Give the length of the longest document, or leave it out.",
    # generation
    "… cannot be given to generate over a ring: …": "The reason follows, with what to do.",
    # training
    'num_items is what the sum is divided by for reduction="mean"; got reduction=…': "Leave it out, or take the mean.",
    "this model is context-parallel: its ContextParallel compares it, cp.verify(batch)": "Call cp.verify(batch).",
    "verify takes either step=, a function of the ring, or a model and a batch": "Give one of the two.",
    # transformers
    "… attentions of … went through the ring, but it has … layers: the others attended to this rank's tokens alone, or carry a "
    "state along the sequence": _SHARD_THE_BATCH,
    "… cannot be given to a model with a sharded batch: …": "The reason follows; leave it out.",
    "… cannot be sharded: …": "The reason follows; take it out of the batch.",
    "chunks without a causal mask: transformers makes none, and chunk_size is causal": "Join the chunks with a causal mask.",
    "documents that restart position_ids cannot be combined with the mask function …, which transformers would count from each "
    "document's start": "Give one document a row.",
    "layer … of … is of type …, which cannot be sharded over a ring: …": _SHARD_THE_BATCH,
    "… makes its position bias in a way that is not known": _SHARD_THE_BATCH,
    "the layers of … do not look their attention up in the AttentionInterface of this version of transformers, so they cannot be "
    "given another; a newer version may have it": "Try the newest transformers that setup.py allows.",
    "the model makes a mask of … queries at … and … keys at …, but this rank has … and … at 0: a K/V cache, or a part of the "
    "sequence, cannot be sharded": "Train with use_cache=False; generate by model.generate and the whole prompt.",
    "of TRL's trainers, the SFTTrainer works on a ring: the others make their loss from sums over whole sequences, and a rank has "
    "its own tokens only": "Train with the SFTTrainer.",
    "… takes no …: it would count positions within this rank's tokens from 0": _SHARD_THE_BATCH,
    "this batch is sharded already": "Give it to the model as it is.",
    "this layer cuts its mask into parts, which a mask over a ring does not allow": _SHARD_THE_BATCH,
    "this layer reads … of its mask, as of a tensor, and a mask over a ring is none": _SHARD_THE_BATCH,
    "… was given to the attention of …: …": "The reason follows; leave it out.",
    "… was taken out of a sharded batch: the model would make its own of this rank's tokens": "Give all that cp.shard made.",
    # integrations
    "cp_handler and cp_backend configure torch's context parallelism; RingParallelism is another one": "Leave both out.",
    "diffusers' plans join the parts of several sequences, so causal has no meaning here": "Leave is_causal out.",
    "diffusers' plans split contiguously, got layout=…; nothing is causal, so the work is even": 'Give layout="contiguous".',
    "… has no attention module that diffusers knows": "Give it a transformer of diffusers.",
    "parallelism is already applied to this …": "Apply it once to a model.",
    "ring attention takes documents from positions; it got an attention mask": "Let positions restart at each document.",
    "RingParallelism is for DDP and FSDP2; … in this configuration was not tried": "Configure accelerate for one of the two.",
    "with cache=, …": "What must hold follows.",
    # generation
    "a cache only grows: max_length is …, got …": "Give a larger max_length.",
    "a KVCache is made for a ring_attn.Ring, got …; Ring(mesh) makes one": "Give it Ring(mesh).",
    "… of a sharded batch is not what cp.shard made": "Change the whole batch before cp.shard.",
    "batch entries are chosen by int64 [entries], in a cache with layers; got …": "Give .long(), after the prompt.",
    "k and v come both, as those of new tokens, or neither, for cross attention; got one of them": "Give both or none.",
    "layer … has had the prompt: the model runs on it once": "Run new tokens after the prompt, or make another KVCache.",
    "q, k and v are of the same new tokens; of … tokens came": "Give the keys and values of the tokens whose queries come.",
    "layer … holds keys and values of (batch, heads, dim, dtype, device) …, but new ones of … came": "Make another KVCache.",
    "layer … keeps … tokens before a query, but this call looks … back (None: all)": "Give a layer the same window in every call.",
    "no prompt is longer than the … tokens that came; got lengths …": "Count lengths without the padding.",
    "the prompts have … tokens, more than the cache's max_length=…": "Make the KVCache with a larger max_length.",
    # peers
    "a line of more than … bytes": "The coordinator closes the connection that sent it.",
    "global rank … has a connection already, or had one": "Start each rank of the job once.",
    "the coordinator process could not start (…): …": "Its own error follows.",
    "there is no global rank … in a world of …": "Give all processes of the job one WORLD_SIZE.",
    "this is another job's token": "The coordinator closes the connection, and its own job goes on.",
    # kernels
    "… ids of one side serve both only when the lengths are equal; got … queries and … keys": "Give those of both sides.",
    # tuning
    "a later release wrote it, in schema …; this one reads …": "Install that release, or name another folder in RING_ATTN_CACHE.",
    "the configuration kept for … cannot run here (…); the kernel's own is used": "Results are right; `--again` searches anew.",
    "the search for … failed (…: …); the kernel's own configuration is used": "Results are right; leave autotune out.",
    "the shipped configurations in … are not used: …": "Results are right; `python -m tools.tune`, in a checkout, finds others.",
    "a search makes its own arrays, and cannot make those of a mask function": "Search for the call without that.",
    "complete is true or false, got …": _ASIDE,
    "it has schema …, and this release reads …": _ASIDE,
    "it is no table of configurations": _ASIDE,
    "it is of …, and this device is …": _ASIDE,
    "process … was to choose the configuration of …, and did not in … s": "See the log of that process.",
    "the entry … is not one of a table (…: …)": _ASIDE,
    "the kernel has no candidates for this": "It has no tiles to choose: leave autotune out.",
    "times are positive numbers, day and versions are text; got …, …, …": _ASIDE,
}
