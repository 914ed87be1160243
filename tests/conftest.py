"""Settings that must be in place before JAX or torch-xla starts: eight CPU devices stand for a ring of up to eight."""

import gc
import os
import sys
from importlib.util import find_spec

import pytest
from effort import ALL, SALT, SELDOM, SHARE, of_the_day

# JAX keeps millions of objects, which Python would look through a tenth of the time.
gc.set_threshold(50_000, 20, 100)

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

# On a GPU, where a test may start JAX before the library does: what the library would set.
if "cuda" in os.environ["JAX_PLATFORMS"]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "cuda_async")

# No caches, unless a folder is named for this run: kernels compiled before save a run on a GPU minutes.
os.environ["RING_ATTN_CACHE"] = os.environ.get("RING_ATTN_CACHE_OF_TESTS", "off")

# For torch-xla, where it is installed: four CPU devices.
os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "4")

# Triton's interpreter is chosen when Triton is imported, so what needs it runs in a process of its own (`make test` starts both);
# and what needs a GPU runs where JAX may use one: JAX_PLATFORMS=cuda pytest -m gpu (`make test-gpu`).
INTERPRETED = [
    *("jax_core/kernels/test_triton.py", "jax_core/kernels/test_kernel_bounds.py", "torch_bridge/attention/test_decoding.py"),
    *("ring_attn/test_passes.py", "ring_attn/test_sums.py"),
]
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else INTERPRETED
collect_ignore += [] if "cuda" in os.environ["JAX_PLATFORMS"] else ["gpu"]

# What needs transformers, accelerate, TRL, diffusers, flax, equinox or torchtitan: `make test-integrations` has them all.
collect_ignore += [] if find_spec("transformers") else ["integrations"]


def pytest_configure():
    if find_spec("torch"):
        from program_cache import keep_programs

        keep_programs()
    if os.environ.get("TRITON_INTERPRET") == "1":
        from kernel_bounds import watch

        watch()


@pytest.fixture(autouse=True)
def nothing_padded_before():
    """What a test pads is no other test's keys."""
    if (padding := sys.modules.get("ring_attn.sharding.padding")) is not None:
        padding._padded.clear()


def pytest_report_header():
    return "all tests" if ALL else f"of what takes long a part, chosen by SALT={SALT} SHARE={SHARE}; FULL=1 tries all"


def pytest_collection_modifyitems(config, items):
    """On a machine with few cores some of the tests that take long are left to other days (``SELDOM``), and of all one in ``SHARE``
    is tried. Of the wide tables the cases that have everything in them are always tried. Asked for by name, any."""
    if ALL or config.option.keyword or any("::" in argument for argument in config.args):
        return
    left = [item for item in items if _is_left_out(item)]
    if len(left) == len(items):  # to run nothing is an error
        left = left[1:]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


def _is_left_out(item):
    marks = {mark.name for mark in item.iter_markers()}
    if "wide" in marks and "everything" in item.nodeid:
        marks -= {"wide", "slow"}
    return of_the_day(item.nodeid, SHARE * max((SELDOM[mark] for mark in marks & SELDOM.keys()), default=1)) != 0
