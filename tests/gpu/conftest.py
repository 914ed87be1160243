"""``make test-gpu`` on a machine without a GPU says so, test by test. ``--part 2/4``: of four parts the second."""

import os

import pytest

from tests.gpu.jobs import GPUS, VISIBLE, need

PARTS = (
    ("test_kernels.py", "test_states.py"),
    ("test_bridge.py", "test_memory.py"),  # alone on its GPUs: it counts their memory, and fills it
    ("test_rings.py", "test_stress.py"),
    ("test_models.py",),
)

# xdist's workers take turns with the GPUs, in what they compute themselves; the jobs that they start see all GPUs (jobs.py).
worker = os.environ.get("PYTEST_XDIST_WORKER", "")
if worker and GPUS > 1:
    names = VISIBLE.split(",") if VISIBLE else [str(number) for number in range(GPUS)]
    os.environ["CUDA_VISIBLE_DEVICES"] = names[int(worker.removeprefix("gw")) % GPUS]


def pytest_addoption(parser):
    parser.addoption("--part", metavar="K/4", help="one of the four parts of tests/gpu")


def pytest_collection_modifyitems(config, items):
    if (part := config.getoption("--part")) is None:
        return
    known = {f"{number}/{len(PARTS)}": files for number, files in enumerate(PARTS, 1)}
    if part not in known:
        raise pytest.UsageError(f"--part must be one of {', '.join(known)}; got {part}")
    left_out = [item for item in items if item.path.name not in known[part]]
    items[:] = [item for item in items if item.path.name in known[part]]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(autouse=True)
def a_gpu():
    need(1)
