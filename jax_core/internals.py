"""All that is taken from inside JAX and jaxlib, beyond what they document. Another version may lack any of it."""

import atexit
import ctypes
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any


def backends_started() -> bool:
    """No public function tells this without starting them."""
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


def job() -> Any:
    """What ``jax.distributed`` knows of this process's job: ``client`` (the coordination service and its store), ``process_id``,
    ``num_processes``."""
    from jax._src import distributed

    return distributed.global_state


def serve_job(address: str, world: int, heartbeat: int) -> object:
    """JAX's coordination service, which lives as long as the result. Recoverable: a task's death neither aborts the others from C++
    nor delays their shutdown."""
    serve = jaxlib().get_distributed_runtime_service
    return serve(address, world, heartbeat_timeout=heartbeat, shutdown_timeout=1, recoverable=True)


def skip_atexit() -> None:
    """In a forked child: what JAX does at exit would send on the parent's own connection to the service, which breaks it and aborts
    the parent."""
    with suppress(ImportError, AttributeError):
        from jax._src import api

        atexit.unregister(api.clean_up)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(job()))


def listen_with_gloo(address: str | None, interface: str | None) -> None:
    """Make the CPU collectives listen there. Before the backends."""
    from jax._src import xla_bridge

    def cpu_client() -> Any:
        return xla_bridge.make_cpu_client(jaxlib().make_gloo_tcp_collectives(job().client, address, interface))

    xla_bridge.register_backend_factory("cpu", cpu_client, priority=0, fail_quietly=False)


def jaxlib() -> ModuleType:
    """Its functions in C++. Raises ImportError."""
    return import_module("jaxlib._jax")


def cudnn_attention() -> ModuleType:
    """Raises ImportError."""
    return import_module("jax._src.cudnn.fused_attention_stablehlo")


def keep_programs_with(folder: Path, read: Callable[[Path], bytes | None], write: Callable[[Path, bytes], None]) -> bool:
    """Has compiled programs kept in files of ``folder`` by these functions; False where JAX keeps them already. Raises ImportError,
    AttributeError and TypeError."""
    from jax._src import compilation_cache
    from jax._src.lru_cache import LRUCache

    class WholeFiles(LRUCache):
        def get(self, key: str) -> bytes | None:
            return read(folder / f"{key}-program")

        def put(self, key: str, value: bytes) -> None:
            write(folder / f"{key}-program", value)

    if compilation_cache._cache is not None or compilation_cache._cache_initialized:
        return False
    compilation_cache._cache, compilation_cache._cache_initialized = WholeFiles(str(folder), max_size=-1), True
    return True


def share_programs() -> None:
    """JAX lets process 0 alone keep programs, lest several write one file, and on CPUs looks in each process for a program of its
    own. From here on any process writes, and processes have one program, by what it computes. Raises ImportError and
    AttributeError."""
    from jax._src import cache_key, compiler

    write, hash_devices, hash_topology = compiler._cache_write, cache_key._hash_devices, cache_key._hash_accelerator_config

    def hash_accelerators(hash_obj: Any, accelerators: Any) -> None:
        on_cpus = all(device.platform == "cpu" for device in accelerators.flat)  # of the model that the folder is named for
        (hash_devices if on_cpus else hash_topology)(hash_obj, accelerators)

    first = SimpleNamespace(global_state=SimpleNamespace(process_id=0))
    compiler._cache_write = FunctionType(write.__code__, {**vars(compiler), "distributed": first}, write.__name__)
    cache_key._hash_accelerator_config = hash_accelerators
