"""The functions of flash-attn 2 and of ring-flash-attention 0.1.8 under their names, over a ring: change the import.

All take ``group``: a ProcessGroup, or whatever ``mesh`` of :func:`ring_attn.ring_attention` may be; None is the default group (a
ring of one without ``torch.distributed``), "local" no ring. Tensors are this rank's shards, of equal shapes on all ranks. What the
names decide is how the sequence is laid out, and whose ``cu_seqlens`` is passed:

- ``flash_attn_*``: contiguous shards; ``cu_seqlens`` are those of the whole sequence. On a ring of one this is flash-attn.
- ``ring_``, ``zigzag_ring_``, ``stripe_flash_attn_*``: contiguous, zigzag, striped. In the varlen forms each document is laid out
  like that by itself, and ``cu_seqlens`` are the local ones: those of the whole sequence divided by the size of the ring.
- ``llama3_flash_attn_varlen_*``: contiguous shards of the whole sequence, and the rank's own ``cu_seqlens``, as
  ``llama3_flash_attn_prepare_cu_seqlens`` returns them.

The arguments mean what they mean there: ``softcap=0.0`` is none, ``window_size=(-1, -1)`` is none, causal masks, windows and ALiBi
count from the last key where queries and keys differ in length. float32 and float64 are taken as well. Differences:

- ``return_attn_probs=True`` returns ``(out, softmax_lse, None)``: nobody has the weights. The LSE is ``[batch, heads, seq]``, or
  ``[heads, tokens]`` in the varlen forms, ``-inf`` where a query sees no key (flash-attn: ``inf``), and differentiable.
- ``deterministic=True`` takes kernels whose sums have one order, and is refused where there is none.
- Windows, ``causal=False`` in zigzag and dropout are computed, not refused or got wrong. Dropout's seed is drawn from torch's
  generator in each call: seed it alike on all ranks to drop what one process would.
- ``softcap`` of the ``ring_``, ``zigzag_ring_``, ``stripe_`` and ``llama3_`` functions is keyword-only: there they have none.
- Slopes for each document (``alibi_slopes [batch, heads]`` in a varlen form) and a ``block_table`` raise NotImplementedError.
"""

from ring_attn.flash.dense import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    ring_flash_attn_func,
    ring_flash_attn_kvpacked_func,
    ring_flash_attn_qkvpacked_func,
    stripe_flash_attn_func,
    stripe_flash_attn_kvpacked_func,
    stripe_flash_attn_qkvpacked_func,
    zigzag_ring_flash_attn_func,
    zigzag_ring_flash_attn_kvpacked_func,
    zigzag_ring_flash_attn_qkvpacked_func,
)
from ring_attn.flash.llama3 import (
    llama3_flash_attn_prepare_cu_seqlens,
    llama3_flash_attn_varlen_func,
    llama3_flash_attn_varlen_kvpacked_func,
    llama3_flash_attn_varlen_qkvpacked_func,
)
from ring_attn.flash.varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    ring_flash_attn_varlen_func,
    ring_flash_attn_varlen_kvpacked_func,
    ring_flash_attn_varlen_qkvpacked_func,
    stripe_flash_attn_varlen_func,
    stripe_flash_attn_varlen_kvpacked_func,
    stripe_flash_attn_varlen_qkvpacked_func,
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func",
    "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_qkvpacked_func",
    "ring_flash_attn_func",
    "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func",
    "ring_flash_attn_varlen_func",
    "ring_flash_attn_varlen_kvpacked_func",
    "ring_flash_attn_varlen_qkvpacked_func",
    "stripe_flash_attn_func",
    "stripe_flash_attn_kvpacked_func",
    "stripe_flash_attn_qkvpacked_func",
    "stripe_flash_attn_varlen_func",
    "stripe_flash_attn_varlen_kvpacked_func",
    "stripe_flash_attn_varlen_qkvpacked_func",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_kvpacked_func",
    "zigzag_ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_varlen_func",
    "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func",
]
