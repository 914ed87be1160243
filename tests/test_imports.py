"""Which module may import which (DESIGN.md), read from the source; what an import loads, seen in a fresh process; how long host
files and functions may be; and that the packages are typed."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tools.import_graph import PACKAGES, ROOT, import_graph, imported, module_name

FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

STANDARD_LIBRARY_ONLY = (
    "jax_core.caches",
    "jax_core.config",
    "jax_core.masks.layout",
    "jax_core.masks.static",
    "jax_core.operands",
    "jax_core.turns",
)
# The layers of jax_core from the lowest up: none imports one above it.
LAYERS = (
    ("caches", "config", "experimental", "internals", "keywords", "turns", "varying"),
    ("masks", "operands", "options"),
    ("kernels",),
    ("tune",),
    ("recurrence", "strategies"),
    ("request",),
    ("api",),
    ("integrations",),
)
# And those of torch_bridge.
ROOMS = (("mesh", "tracing"), ("failures",), ("start",), ("backends", "runtime"), ("call",), ("attention", "recurrence"))
# The floors of ring_attn.
FACE = (
    ("documents", "memory", "sharding", "version"),
    ("arguments",),
    ("explain", "flash", "functional", "recurrence", "ring"),
    ("generation", "module", "packed", "parallel", "torch_sdpa", "training"),
    ("verification",),
    ("command", "doctor", "integrations", "__main__"),
)
# And the rooms of its largest integration.
TRANSFORMERS = (
    ("calls", "generation", "sequence", "versions"),
    ("layers",),
    ("model",),
    ("batch",),
    ("verify",),
    ("context", "verify_command"),
)
ORDERS = {
    "jax_core": LAYERS,
    "torch_bridge": ROOMS,
    "ring_attn": FACE,
    "ring_attn.integrations.transformers": TRANSFORMERS,
}
# Layers whose folders are alternatives to each other: none imports another, only the files beside them.
WITH_SIBLINGS = ("kernels", "strategies")
SHARED = ("pairs", "transfers")  # folders beside them that are none
# Of a room that has a face: its files that others import, and who may import the rest.
FACES = {
    "torch_bridge.failures": (
        ("watchdog", "events"),
        ("torch_bridge.start", "torch_bridge.runtime", "torch_bridge.call.error_propagation", "torch_bridge.call.busy"),
    ),
}
OUTSIDE = ("testing",)  # the oracle: only tests and benchmarks import it, and it imports nothing but the definition of dropout

# Modules that import within a function what imports them, each with its reason. Empty is best.
DEFERRING: dict[str, str] = {}

# Host files and functions over the limit, each with its reason. Empty is best.
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def forbidden(module: str, name: str) -> str | None:
    """Why ``module`` may not import ``name``, or None."""
    checks = (package_reason, internals_reason, standard_library_reason, sibling_reason, oracle_reason, face_reason, layer_reason)
    return next((reason for check in checks if (reason := check(module, name))), None)


def package_reason(module: str, name: str) -> str | None:
    above = {"ring_attn": ("jax", "jaxlib"), "torch_bridge": ("ring_attn",), "jax_core": ("ring_attn", "torch_bridge", "torch")}
    if any(within(name, other) for other in above[module.split(".")[0]]):
        return "the order is ring_attn -> torch_bridge -> jax_core; only the bridge knows both torch and jax"
    return None


def internals_reason(module: str, name: str) -> str | None:
    inside = name.split(".")[0] in ("jax", "jaxlib") and any(part.startswith("_") for part in name.split("."))
    return "what is taken from inside JAX is in jax_core.internals" if inside and module != "jax_core.internals" else None


def standard_library_reason(module: str, name: str) -> str | None:
    if module not in STANDARD_LIBRARY_ONLY:
        return None
    allowed = name.split(".")[0] in sys.stdlib_module_names or any(within(name, other) for other in STANDARD_LIBRARY_ONLY)
    return None if allowed else "it is standard library only"


def sibling_reason(module: str, name: str) -> str | None:
    (own_layer, own), (layer, other) = sibling(module), sibling(name)
    if own_layer is None or own_layer != layer or None in (own, other) or own == other:
        return None
    return f"{own} and {other} are siblings in jax_core.{layer}: what both need lies beside them"


def sibling(name: str) -> tuple[str | None, str | None]:
    """The layer with siblings that a module is in, and its folder there."""
    parts = name.split(".")
    if len(parts) < 3 or parts[0] != "jax_core" or parts[1] not in WITH_SIBLINGS:
        return None, None
    alone = (ROOT / "jax_core" / parts[1] / parts[2]).is_dir() and parts[2] not in SHARED
    return parts[1], parts[2] if alone else None


def oracle_reason(module: str, name: str) -> str | None:
    inside = within(module, "jax_core.testing")
    if within(name, "jax_core.testing") and not (inside or within(module, "ring_attn.doctor")):
        return "the oracle is for tests, and for the doctor, which tests an installation"
    if not inside or not within(name, "jax_core"):
        return None
    allowed = any(within(a, b) for a, b in (("jax_core.masks.dropout", name), (name, "jax_core.masks.dropout")))
    return None if allowed else "the oracle shares no code with what it checks, but dropout's pattern, which is a definition"


def face_reason(module: str, name: str) -> str | None:
    for room, (face, inside) in FACES.items():
        behind = within(name, room) and name != room and not any(within(name, f"{room}.{file}") for file in face)
        if behind and not any(within(module, other) for other in (room, *inside)):
            return f"of {room} others use {' and '.join(face)}"
    return None


def layer_reason(module: str, name: str) -> str | None:
    for package, layers in ORDERS.items():
        own, other = layer(module, package), layer(name, package)
        if own is not None and other is not None and other > own:
            return f"{module} is below {name}: " + " -> ".join("/".join(names) for names in reversed(layers))
    return None


def layer(name: str, package: str) -> int | None:
    """The height of the layer of a package that a name is in: that of the longest entry it is within."""
    layers = enumerate(ORDERS[package])
    heights = {entry: height for height, names in layers for entry in names if within(name, f"{package}.{entry}")}
    return heights[max(heights, key=len)] if heights else None


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_follow_the_rule(package):
    broken = {}
    for path in (ROOT / package).rglob("*.py"):
        module = module_name(path)
        names = imported(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")
        broken |= {(module, name): reason for name in sorted(names) if (reason := forbidden(module, name))}
    assert not broken


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_is_read(package):
    assert any(within(module_name(path), package) for path in FILES)


def test_every_module_is_in_a_layer():
    modules = {module_name(path) for path in FILES} - ORDERS.keys()
    for package in ORDERS:
        inside = sorted(name for name in modules if within(name, package) and name.split(".")[1] not in OUTSIDE)
        assert inside
        assert [name for name in inside if layer(name, package) is None] == []
    assert len(LAYERS) <= 8 and all(len(layers) <= 6 for layers in (ROOMS, FACE, TRANSFORMERS))


def cycle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_modules_import_each_other():
    """Neither directly nor in a circle; nor by an import within a function, but for the modules that are listed with a reason."""
    sources = {module_name(path): (path.read_text(encoding="utf-8"), path.name == "__init__.py") for path in FILES}
    graph = import_graph(sources, set(DEFERRING))
    assert sum(map(len, graph.values())) > len(FILES)  # imports are seen
    assert cycle(graph) == []
    for module in DEFERRING:  # an exception that nothing needs any more goes
        assert cycle(import_graph(sources, set(DEFERRING) - {module})) != []


def test_a_circle_of_imports_is_seen():
    sources = {
        "room": ("from room import a", True),
        "room.a": ("from room.b import x", False),
        "room.b": ("def f():\n    from . import c", False),
        "room.c": ("import room.a", False),
    }
    assert set(cycle(import_graph(sources))) == {"room.a", "room.b", "room.c"}
    assert cycle(import_graph(sources | {"room.c": ("", False)})) == []
    assert cycle(import_graph(sources | {"room.c": ("if TYPE_CHECKING:\n    import room.a", False)})) == []
    assert cycle(import_graph(sources, {"room.b"})) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("jax_core.api.attention", "import torch.nn"),
        ("jax_core.api.attention", "def f():\n    from torch_bridge import mesh"),
        ("jax_core.api.attention", "import importlib\nimportlib.import_module('torch')"),
        ("jax_core.api.attention", "from jax_core.testing.oracle import reference_attention"),
        ("jax_core.api.attention", "from jax_core.integrations import flax"),
        ("jax_core.testing.oracle", "from jax_core.masks.static import visible"),
        ("torch_bridge.mesh.rings", "from torch_bridge.call import programs"),
        ("torch_bridge.backends.compiled", "from torch_bridge.failures import peers"),
        ("torch_bridge.call.autograd", "def f():\n    from torch_bridge.attention import operation"),
        ("torch_bridge.backends.torch_xla", "from torch_bridge.attention.operation import Attention"),
        ("torch_bridge.mesh.rings", "from ring_attn.functional import ring_attention"),
        ("ring_attn.functional", "def f():\n    import jax"),
        ("ring_attn.arguments.checks", "from ring_attn.functional import ring_attention"),
        ("ring_attn.training.loss", "from ring_attn.verification.step import verify"),
        ("ring_attn.integrations.transformers.layers.masks", "from ring_attn.integrations.transformers.model import plan"),
        ("ring_attn.integrations.transformers.batch.loss", "from ring_attn.integrations.transformers import context"),
        ("jax_core.masks.static", "import numpy"),
        ("jax_core.masks.layout", "from jax_core.kernels import contract"),
        ("jax_core.strategies.ring.loop", "from jax_core.request.spec import make_spec"),
        ("jax_core.strategies.ring.loop", "from jax_core.strategies import fused_ring"),
        ("jax_core.kernels.xla.kernel", "from jax_core.strategies.ring import loop"),
        ("jax_core.kernels.xla.kernel", "from jax_core.kernels import triton"),
        ("jax_core.kernels.triton.constants", "from ..xla import blocks"),
        ("jax_core.kernels.contract", "from jax_core.strategies import contract"),
        ("jax_core.kernels.xla.kernel", "from jax_core.tune import lookup"),
        ("jax_core.kernels.cudnn.calls", "def f():\n    from jax._src.cudnn import fused_attention_stablehlo"),
        ("torch_bridge.start.network", "from jaxlib import _jax"),
        ("torch_bridge.backends.dlpack", "import importlib\nimportlib.import_module('jaxlib._jax')"),
        ("jax_core.tune.lookup", "from jax_core.request import dispatch"),
    ],
)
def test_the_rule_sees(module, source):
    assert any(forbidden(module, name) for name in imported(source, module))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("jax_core.api.attention", "import jax\nfrom jax_core.strategies import ring\nfrom jax_core.kernels import xla"),
        ("torch_bridge.call.autograd", "import jax, torch\nfrom jax_core.operands import Operands"),
        (
            "ring_attn.sharding.sequence",
            "import torch\nfrom jax_core.masks.layout import runs\nfrom torch_bridge.mesh.rings import resolve",
        ),
        ("jax_core.masks.static", "from typing import NamedTuple\nfrom jax_core.masks.layout import Run"),
        (
            "jax_core.kernels.xla.kernel",
            "import jax\nfrom jax_core.kernels.contract import Partial",
        ),
        (
            "jax_core.kernels.triton.constants",
            "import triton\nfrom .blocks import place\nfrom jax_core.kernels.triton import scores",
        ),
        ("jax_core.strategies.fused_ring.host", "from jax_core.kernels.merge import join_sinks"),
        ("jax_core.request.dispatch", "from jax_core.tune import lookup"),
    ],
)
def test_the_rule_allows(module, source):
    assert not any(forbidden(module, name) for name in imported(source, module))


def loaded_after(statement: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after ``statement``."""
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def test_the_torch_packages_load_no_jax_and_no_compiler():
    assert not loaded_after("import ring_attn, torch_bridge.mesh.rings") & {"jax", "jaxlib", "torch._dynamo", "triton"}


CALL = "ring_attn.ring_attention(x, x, x, mesh='local').sum().backward()\n"
FIRST_CALL = f"import torch, ring_attn\nx = torch.ones(1, 4, 1, 8, requires_grad=True)\n{CALL}"
COUNTED = """
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    ring_attn.ring_attention(x, x, x, mesh='local').sum().backward()
assert {str(name) for name in counter.get_flop_counts()['Global']} == {'ring_attn.forward', 'ring_attn.backward'}
"""


def test_what_a_first_call_imports():
    """No kernels for TPUs, and no Triton where none of its kernels runs: each takes a third of a second. torch's counter of
    operations knows them once it is imported."""
    assert not loaded_after(FIRST_CALL) & {"jax.experimental.pallas.tpu", "triton", "torch.utils.flop_counter"}
    assert "torch.utils.flop_counter" in loaded_after(FIRST_CALL + COUNTED)


@pytest.mark.parametrize(
    "before",
    [
        "import torch\nfrom torch.utils.flop_counter import FlopCounterMode\ncounter = FlopCounterMode(display=False)",
        "import importlib.util\nimport torch_bridge.call.operators\nimportlib.util.find_spec('torch.utils.flop_counter')",
    ],
    ids=["a counter that is older than the first call", "one whose module was looked up and not imported"],
)
def test_counters_of_operations_know_a_call(before):
    counted = COUNTED.replace("FlopCounterMode(display=False) as", "counter as") if "counter =" in before else COUNTED
    assert "torch.utils.flop_counter" in loaded_after("\n".join([before, FIRST_CALL.replace(CALL, ""), counted]))


@pytest.mark.parametrize("module", STANDARD_LIBRARY_ONLY)
def test_position_arithmetic_loads_no_framework(module):
    assert not loaded_after(f"import {module}") & {"jax", "jaxlib", "torch", "numpy"}


def test_jax_core_starts_no_backend_and_loads_no_torch():
    # Every public name is touched: they are loaded on first use.
    touch = "import jax_core\n[getattr(jax_core, name) for name in jax_core.__all__]\n"
    check = (
        "from jax._src import xla_bridge\nassert not xla_bridge.backends_are_initialized(), 'importing jax_core started a backend'"
    )
    loaded = loaded_after(touch + check)
    assert "jax" in loaded
    assert "torch" not in loaded


def test_the_packages_are_typed(tmp_path):
    """Each has its marker, and a built wheel brings it along."""
    assert [package for package in PACKAGES if not (ROOT / package / "py.typed").is_file()] == []
    build = ["build_py", "--build-lib", str(tmp_path), "egg_info", "--egg-base", str(tmp_path)]
    command = [sys.executable, "setup.py", "--quiet", *build]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    assert [package for package in PACKAGES if not (tmp_path / package / "py.typed").is_file()] == []


def host_files() -> list[Path]:
    """All but the kernels: device code is measured by other things than its lines."""
    return [path for path in FILES if "kernels" not in path.relative_to(ROOT).parts]


def asked_of_devices(source: str) -> set[str]:
    """The questions to devices in a file's code."""
    names = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    return names & {"devices", "local_devices", "default_backend", "compute_capability", "device_kind", "abstract_device"}


def test_kernels_and_strategies_ask_no_device():
    """What they may know of the hardware is in their problem (``request/hardware.py``)."""
    assert asked_of_devices("def f():\n    return jax.local_devices(backend='gpu')[0].compute_capability") == {
        "local_devices",
        "compute_capability",
    }
    paths = [path for folder in ("kernels", "strategies") for path in (ROOT / "jax_core" / folder).rglob("*.py")]
    asking = {module_name(path): asked_of_devices(path.read_text(encoding="utf-8")) for path in paths}
    assert len(asking) > 80 and not any(asking.values())


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring: the contract of a public one may be long."""
    document = node.body[0] if ast.get_docstring(node) else None
    return (node.end_lineno or 0) - node.lineno + 1 - (((document.end_lineno or 0) - document.lineno + 1) if document else 0)


def long_files() -> set[str]:
    return {str(path.relative_to(ROOT)) for path in host_files() if len(path.read_text(encoding="utf-8").splitlines()) > 400}


def long_functions() -> set[str]:
    return {f"{module_name(path)}.{node.name}" for path in host_files() for node in functions(path) if code_lines(node) > 80}


def test_host_files_are_short():
    """At most 400 lines; an exception that nothing needs any more goes."""
    assert long_files() == set(LONG_FILES)


def test_host_functions_are_short():
    """At most 80 lines, docstring aside."""
    assert long_functions() == set(LONG_FUNCTIONS)
