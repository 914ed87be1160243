"""Stands in for TPUs where there are none: Pallas' interpreters run the kernels on CPU devices."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

from jax._src.pallas.mosaic import tpu_info
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_core.kernels.tpu import params
from jax_core.request import hardware

CHIP = tpu_info.ChipVersion.TPU_V5E


@contextmanager
def kernels_interpreted(lanes: int = params.LANES) -> Iterator[None]:
    """The kernels of one pair of shards, in the interpreter that turns a kernel into plain JAX. ``lanes``: block sizes are
    multiples of it; a small value splits a small shard into many blocks."""
    with (
        patch.object(params, "missing", lambda backend: None),
        patch.object(hardware, "generation", lambda backend: "TPU v5e"),
        patch.object(params, "LANES", lanes),
        patch.object(pl, "pallas_call", partial(pl.pallas_call, interpret=True)),
    ):
        yield


@contextmanager
def tpus_interpreted(how: pltpu.InterpretParams) -> Iterator[None]:
    """Kernels that send from device to device, in the interpreter that simulates TPU memories, semaphores and DMAs."""
    chip = tpu_info.get_tpu_info_for_chip(CHIP, 1)
    with (
        patch.object(params, "missing", lambda backend: None),
        patch.dict(tpu_info.registry, cpu=lambda: chip),  # a pipeline inside a kernel queries the TPU generation
        pltpu.force_tpu_interpret_mode(how),
    ):
        yield
