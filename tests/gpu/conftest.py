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


class AtOnce:
    """Failures are told as they come: a run on a lent machine may be cut off before its end."""

    def __init__(self, config):
        self.terminal = config.pluginmanager.get_plugin("terminalreporter")

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.terminal.write_line(f"\n{report.nodeid} ({report.when}): {report.longreprtext}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if not worker:
        config.pluginmanager.register(AtOnce(config))


@pytest.fixture(autouse=True)
def a_gpu():
    need(1)
