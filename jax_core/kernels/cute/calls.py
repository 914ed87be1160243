"""flash-attn-4's kernels as XLA calls, by the road that NVIDIA's ``cutlass_call`` takes. All that may change between versions of
flash-attn-4 and of NVIDIA's DSL is in this file and in programs.py, and the versions are pinned.

``cutlass_call`` compiles a program into an object, whose bytes are an attribute of an XLA call that a library of NVIDIA's runs.
Here the object is compiled once a machine: it is kept in a file, by everything that it depends on. Where the file exists neither
the DSL nor flash-attn-4 is loaded, which takes seconds; only the library is.
"""

import ctypes
import hashlib
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jax_core.caches import cache_folder, read_cached, write_cached
from jax_core.kernels.contract import no_gpu
from jax_core.kernels.cute.settings import OfProgram
from jax_core.kernels.cute.tiles import TILES
from jax_core.masks import static
from jax_core.varying import vary, varying_axes

PINNED = {"flash-attn-4": "4.0.0b36", "nvidia-cutlass-dsl": "4.8.1", "quack-kernels": "0.6.5", "apache-tvm-ffi": "0.1.15.post2"}
_TARGET = "CuteDSLRT_NvJaxCutlassCall_v2"
_SYMBOLS = {stage: f"CuteDSLRT_NvJaxCutlassCall{stage.capitalize()}_v2" for stage in ("instantiate", "prepare", "execute")}
_STATE = {name: f"CuteDSLRT_NvJaxCutlassCallState{word}_v2" for name, word in (("type_id", "TypeId"), ("type_info", "TypeInfo"))}


class Shaped(NamedTuple):
    """An operand, and a divisor of each of its dims that the program may rely on."""

    array: Array | jax.ShapeDtypeStruct  # this, of a result
    units: tuple[int, ...]


Operand = Shaped | tuple["Operand", ...] | None


def call(
    name: str,
    settings: OfProgram,
    inputs: Sequence[Operand],
    in_place: Sequence[Shaped],
    results: Sequence[Shaped],
) -> tuple[Array, ...]:
    """Runs ``programs.<name>(stream, *inputs, *in_place, *results, settings)``.

    ``inputs``: trees of :class:`Shaped` and None. What the program changes is ``in_place``: those arrays as it leaves them come
    first, in the same memory unless XLA still needs the old contents; then ``results``.
    """
    operands = jax.tree.leaves((*inputs, *in_place), is_leaf=_is_shaped)
    for operand in (*operands, *results):
        assert not any(size % unit for size, unit in zip(operand.array.shape, operand.units, strict=True)), operand
    arrays = [operand.array for operand in operands]
    types = [jax.ShapeDtypeStruct(x.array.shape, x.array.dtype) for x in (*in_place, *results)]
    compiled_for = jax.tree.map(_canonical, ((*inputs, *in_place), tuple(results)), is_leaf=_is_shaped)
    code = _code(name, settings, compiled_for, len(in_place), _architecture(settings.tile.capability), cache_folder())
    register()
    aliases = {len(arrays) - len(in_place) + i: i for i in range(len(in_place))}

    def run(*arrays: Array) -> tuple[Array, ...]:
        kernel_call = jax.ffi.ffi_call(_TARGET, types, input_output_aliases=aliases)
        return tuple(kernel_call(*arrays, module=code, key=hashlib.sha256(code).digest()))

    # The call has no rule for vmap: entries are computed one after another. Its results carry no varying axes.
    return vary(jax.custom_batching.sequential_vmap(run)(*arrays), varying_axes(arrays))


def _is_shaped(x: object) -> bool:
    return isinstance(x, Shaped)


class _Type(NamedTuple):
    """A dtype and the divisors of a shape, in a form whose text is the same in every process."""

    dtype: str
    units: tuple[int, ...]


Types = tuple["_Type | tuple[Types, ...] | None", tuple[_Type, ...]]


def _canonical(operand: Shaped) -> _Type:
    return _Type(str(operand.array.dtype), operand.units)


# ------------------------------------------------------------------------------------------------------- the compiled objects


@cache
def _code(name: str, settings: OfProgram, types: Types, in_place: int, architecture: str, folder: Path | None) -> bytes:
    """The compiled object, from its file if there is one."""
    if folder is None:
        return _compile(name, settings, types, in_place)
    versions = sorted((package, metadata.version(package)) for package in PINNED)
    text = repr((name, settings, types, in_place, architecture, versions, jax.__version__, _sources()))
    path = folder / "cute" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:32]}.o"
    code = read_cached(path)
    if code is None:
        code = _compile(name, settings, types, in_place)
        with suppress(OSError):  # a folder that cannot be written is no error: the next process compiles again
            write_cached(path, code)
    return code


@cache
def _sources() -> str:
    """The hash of what a program is written in, beside the pinned packages: files of another version of this library are no use."""
    files = Path(__file__).with_name("programs.py"), Path(static.__file__)
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _compile(name: str, settings: OfProgram, types: Types, in_place: int) -> bytes:
    """2 to 10 s. ``types``: of the inputs, of which the last ``in_place`` are changed, and of the results."""
    # What flash-attn-4, and code that the DSL makes of it, uses of the DSL. The filters stay: to put back what was there would undo
    # what other threads have set since.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="flash_attn|quack|cutlass")
    warnings.filterwarnings("ignore", "warpgroup|cutlass|cute", DeprecationWarning)
    from cutlass.jax import compile as dsl
    from cutlass.jax.types import default_tensor_spec

    from jax_core.kernels.cute import programs

    def arguments(kinds: Sequence[_Type]) -> "tuple[dsl.Arg, ...]":
        return tuple(dsl.Arg(i, x.units, jnp.dtype(x.dtype), default_tensor_spec(x.units)) for i, x in enumerate(kinds))

    inputs, results = (jax.tree.leaves(part, is_leaf=_is_type) for part in types)
    changed = inputs[len(inputs) - in_place :]
    inputs_of_kernel, outputs = arguments(inputs), arguments(changed + results)
    spec = dsl.FunctionSpec(
        in_args=inputs_of_kernel,
        input_tree=jax.tree.structure(types[0], is_leaf=_is_type),
        out_args=outputs,
        output_tree=jax.tree.structure(types[1], is_leaf=_is_type),
        input_output_aliases=tuple((len(inputs) - in_place + i, i) for i in range(in_place)),
        input_spec=tuple(x.spec for x in inputs_of_kernel),
        output_spec=tuple(x.spec for x in outputs),
        compile_options=None,
        use_static_tensors=False,
        kwargs=(("settings", settings),),
    )
    return dsl.get_or_compile_kernel(getattr(programs, name), spec, compile_key=(name, repr(settings), repr(types))).module


def _is_type(x: object) -> bool:
    return isinstance(x, _Type)


def _architecture(capability: int) -> str:
    return os.environ.get("CUTE_DSL_ARCH") or f"sm_{capability}a"


# -------------------------------------------------------------------------------------------------------- the library, versions


@cache
def register() -> None:
    """Makes the library's functions known to XLA."""
    library = ctypes.CDLL(str(_library()))
    capsules = _capsules(library, _STATE, called=True)
    jax.ffi.register_ffi_type(
        "CuteDSLRT_NvJaxCutlassCallTypes_v2", {"type_id": capsules["type_id"], "type_info": capsules["type_info"]}, platform="CUDA"
    )
    jax.ffi.register_ffi_target(_TARGET, _capsules(library, _SYMBOLS, called=False), platform="CUDA")


def _capsules(library: ctypes.CDLL, names: Mapping[str, str], called: bool) -> dict[str, object]:
    capsules = {}
    for key, name in names.items():
        function = getattr(library, name)
        function.restype = ctypes.c_void_p
        capsules[key] = jax.ffi.pycapsule(function() if called else function)
    return capsules


def _library() -> Path | None:
    package = util.find_spec("nvidia_cutlass_dsl")
    folders = [] if package is None else list(package.submodule_search_locations or [])
    libraries = [path for folder in folders for path in Path(folder).glob("cu*/lib/libcute_dsl_runtime.so")]
    return max(libraries, default=None)


def missing(backend: str, capability: int) -> str | None:
    """Why flash-attn-4's kernels cannot be called there, in words, or None."""
    if reason := no_gpu(backend, capability):
        return f"flash-attn-4 needs an NVIDIA GPU, and {reason}"
    known = " and ".join(str(number / 10) for number in TILES)
    return changed() or (
        None if capability in TILES else f"the cute kernel is for compute capability {known}, this GPU has {capability / 10}"
    )


@cache
def changed() -> str | None:
    """How what is installed differs from what this file was written for, or None."""
    for package, pinned in PINNED.items():
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            return f"the cute kernel needs {package}=={pinned}; pip install '.[hopper]' in a checkout"
        if version != pinned:
            return f"the cute kernel was written for {package}=={pinned}, this is {version}"
    if jax.version.__version_info__ < (0, 10, 0):
        return f"the cute kernel needs jax >= 0.10, this is {jax.__version__}"
    return None if _library() else "the cute kernel finds no libcute_dsl_runtime.so; pip install '.[hopper]' in a checkout"
