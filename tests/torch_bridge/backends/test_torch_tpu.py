"""TorchTPU's backend without a TPU: its JAX functions on CPU devices, its operators on meta tensors, and the very programs that it
would run, compiled ahead of time for eight TPUs.

What needs torch-tpu runs by ``make test-torch-tpu``, in an environment of its own; nothing here ran on a TPU.
"""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch.utils._python_dispatch import TorchDispatchMode

import jax_core
import ring_attn
from jax_core.options import Options
from torch_bridge.attention.operation import OPERANDS, Attention
from torch_bridge.backends import torch_tpu as tpu
from torch_bridge.backends.operation import Request, TensorSpec
from torch_bridge.mesh.rings import AXIS, ProcessRing

WORLD, RANK = 8, 3
GRIDS = [pytest.param((1, 8, 1), marks=pytest.mark.slow), (2, 4, 1), (2, 2, 2)]
ALONE = ProcessRing((RANK,), 0)
QKV = ("query", "key", "value")
OF_DYNAMO = "ignore:.*should not be instantiated:DeprecationWarning"  # its own, of every autograd.Function
needs_torch_tpu = pytest.mark.skipif(find_spec("torch_tpu") is None, reason="needs torch-tpu: make test-torch-tpu")


@pytest.fixture(scope="module")
def world():
    """Eight processes, of which this is one."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def torch_tpu(world):
    """torch-tpu with one thing made up, the name of the chip, and meta tensors on its backend."""
    from torch_tpu._internal.device import _device_ops_backend

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")  # or libtpu asks the cloud which TPU this is, and waits
        patch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        patch.setattr(_device_ops_backend, "_get_local_device_attributes", lambda: {"device_kind": "TPU v5 lite"})
        for module in (
            "torch_bridge.call.autograd",
            "torch_bridge.attention.functional",
            "torch_bridge.call.programs",
            "ring_attn.module.attention",
        ):
            patch.setattr(f"{module}.backend_of", lambda device: tpu)
        yield


def meta(*shape, dtype=torch.bfloat16, grad=True):
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)


def qkv(length=16, dtype=torch.bfloat16):
    return [meta(2, length, 4, 32, dtype=dtype), meta(2, length, 2, 32, dtype=dtype), meta(2, length, 2, 16, dtype=dtype)]


def form(tensor):
    return tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()


def test_torch_tpu_is_loaded_only_for_its_tensors():
    code = "import sys, torch_bridge.backends.torch_tpu\nassert 'torch_tpu' not in sys.modules"
    environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PATH": ""}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=Path(__file__).parents[3], env=environment)


@pytest.mark.skipif(find_spec("torch_tpu") is not None, reason="torch-tpu is here")
def test_without_torch_tpu_the_error_says_what_to_install():
    with pytest.raises(ImportError, match=r'tensors on "tpu" need torch-tpu >= 0.2.*pip install'):
        program(*qkv())


def request_of(q, k, v, ring=ALONE, further=None, **options):
    given = dict(zip(QKV, (q, k, v), strict=True)) | (further or {})
    options = {"lse_gradient": False, **options}
    specs = (None if x is None else TensorSpec(tuple(x.shape), x.dtype) for x in map(given.get, OPERANDS))
    return Request(ring, Attention(Options(**options)), tuple(specs), q.device)


def program(q, k, v, **options):
    tpu.check(q)
    return tpu.program(request_of(q, k, v, **options))


def test_float64_is_refused():
    with pytest.raises(NotImplementedError, match="must be bfloat16, float16 or float32 on a TPU, got float64; cast"):
        program(*qkv(dtype=torch.float64))


def test_kernels_of_a_gpu_are_refused():
    with pytest.raises(NotImplementedError, match=r'platform="triton": .* an NVIDIA GPU, .* on "tpu"; use platform="auto"'):
        program(*qkv(), platform="triton")


@pytest.fixture
def platforms():
    before = jax.config.jax_platforms
    yield lambda names: jax.config.update("jax_platforms", names)
    jax.config.update("jax_platforms", before)


def test_jax_must_not_take_the_tpu(platforms):
    platforms("tpu,cpu")
    with pytest.raises(RuntimeError, match=r"got platforms 'tpu,cpu'; set JAX_PLATFORMS=cpu"):
        program(*qkv())


def test_jax_that_was_told_nothing_keeps_to_the_cpu(platforms):
    platforms(None)
    tpu.keep_jax_on_cpu()
    assert jax.config.jax_platforms == "cpu"


@pytest.mark.parametrize(
    ("ranks", "grid"), [(range(8), (1, 8, 1)), (range(4, 8), (2, 4, 1)), ((1, 5), (1, 2, 4)), ((4, 6), (2, 2, 2)), ((3,), None)]
)
def test_rings_that_tile_the_world(world, ranks, grid):
    assert tpu.tile_world(ProcessRing(tuple(ranks), 0)) == grid


@pytest.mark.parametrize("ranks", [(1, 0), (0, 1, 3), range(3), range(1, 5), (2, 4), range(7, -1, -1)])
def test_rings_that_do_not(world, ranks):
    with pytest.raises(
        NotImplementedError, match=r"8 processes, which equal rings .* must tile; got a ring of .*; take a dimension"
    ):
        tpu.tile_world(ProcessRing(tuple(ranks), 0))


@pytest.mark.parametrize("grid", GRIDS)
def test_its_jax_functions_are_ring_attention(grid):
    """On CPU devices, against the whole sequence of each ring on one device."""
    normal = iter(jax.random.split(jax.random.key(0), 20))
    blocks, length = (2 * WORLD, 6), 6 * grid[1]
    query, key, value, dout = (jax.random.normal(next(normal), (*blocks, heads, 8)) for heads in (4, 2, 2, 4))
    sinks = jnp.tile(jax.random.normal(next(normal), (4,)), WORLD)
    dlse = jax.random.normal(next(normal), (2 * WORLD, 4, 6))

    def whole(array, dim):
        """``[before * after * batch, whole sequence, ...]`` of blocks of rows on each process."""
        split = array.reshape(*grid, 2, *array.shape[1:])
        order = jnp.moveaxis(split, 1, dim + 2)  # the ring's axis goes in front of the sequence
        return order.reshape(-1, *array.shape[1:dim], length, *array.shape[dim + 1 :])

    shards = [torch.empty(len(x) // WORLD, *x.shape[1:], device="meta") for x in (query, key, value, sinks)]
    options = dict(causal=True, platform="xla", lse_gradient=True)  # the Pallas kernels do not run on a CPU
    request = request_of(*shards[:3], further={"softmax_aux": shards[3]}, **options)
    attention = request.operation.local(request, tpu.placement(grid))
    forward, backward = tpu.over_world(request, attention, Mesh(np.array(jax.devices()[:WORLD]), (AXIS,)), grid)
    operands = [query, key, value, sinks]
    out, lse = jax.jit(forward)(operands)
    gradients = jax.jit(backward, static_argnums=1)([*operands, out, lse, dout, dlse], (0, 1, 2, 3))

    def expected(query, key, value, sinks):
        return jax_core.ring_attention(query, key, value, sinks, causal=True, return_lse=True)

    wholes = [*(whole(x, 1) for x in (query, key, value)), sinks[:4]]
    want, transpose = jax.vjp(expected, *wholes)
    close = dict(rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(whole(out, 1), want[0], **close)
    np.testing.assert_allclose(whole(lse, 2), want[1], **close)
    *wanted, wanted_sinks = transpose((whole(dout, 1), whole(dlse, 2)))
    for gradient, theirs in zip(gradients, wanted, strict=False):
        np.testing.assert_allclose(whole(gradient, 1), theirs, **close)
    np.testing.assert_allclose(gradients[3].reshape(WORLD, 4).sum(0), wanted_sinks, **close)  # each process has its part


CASES = {
    "causal": lambda: dict(causal=True, layout="zigzag"),
    "bhsd": lambda: dict(qkv_format="bhsd"),
    "lse, sinks, bias, mask": lambda: dict(
        return_lse=True,
        sinks=meta(4, 3),
        bias=meta(1, 4, 16, 16 * WORLD, dtype=torch.float32),
        mask=meta(2, 1, 1, 16 * WORLD, dtype=torch.bool, grad=False),
    ),
    "ids, slopes, dropout": lambda: dict(
        q_segment_ids=meta(2, 16, dtype=torch.int64, grad=False), alibi_slopes=meta(4, dtype=torch.float32), dropout_p=0.1
    ),
    "mask_mod": lambda: dict(mask_mod=lambda batch, head, q_pos, k_pos: TABLE[q_pos % 4, k_pos % 4]),
    "mask_builder": lambda: dict(mask_builder=lambda q_len, kv_len, heads, head, reps: np.tri(q_len, kv_len, dtype=bool)),
    "window, frozen key": lambda: dict(sliding_window=(20, 0), causal=True, softcap=5.0),
}
TABLE = jnp.asarray(np.tri(4, dtype=bool))


@needs_torch_tpu
@pytest.mark.parametrize("case", CASES)
def test_autograd_on_meta_tensors(torch_tpu, case):
    """Shape, dtype and memory format of the output and of every gradient; torch-tpu takes those of the output from the program."""
    inputs, options = qkv(), CASES[case]()
    inputs[1].requires_grad_("frozen" not in case)
    laid = [x.transpose(1, 2) for x in inputs] if case == "bhsd" else inputs
    result = ring_attn.ring_attention(*laid, **options)
    out, *lse = result if isinstance(result, tuple) else (result,)
    out = out.transpose(1, 2) if case == "bhsd" else out
    assert form(out) == ((2, 16, 4, 16), torch.bfloat16, True)
    assert [form(x) for x in lse] == [((2, 4, 16), torch.float32, True)] * options.get("return_lse", False)
    leaves = [x for x in (*inputs, *options.values()) if isinstance(x, torch.Tensor) and x.requires_grad]
    gradients = torch.autograd.grad(sum(x.sum() for x in (out, *lse)), leaves)
    assert [form(gradient) for gradient in gradients] == [form(leaf) for leaf in leaves]


@needs_torch_tpu
def test_the_module_on_meta_tensors(torch_tpu):
    attention = ring_attn.RingAttention(64, 4, batch_first=True, num_kv_heads=2, causal=True, sinks=True, device="meta")
    x = meta(2, 16, 64, dtype=torch.float32)
    out, _ = attention(x, x, x)
    out.sum().backward()
    assert [form(leaf.grad) for leaf in (x, *attention.parameters())] == [form(leaf) for leaf in (x, *attention.parameters())]


@needs_torch_tpu
def test_operators_keep_torchs_rules(torch_tpu):
    made = made_for((1, 8, 1), *qkv(), causal=True, lse_gradient=True)
    operands = [x.detach() for x in qkv()]
    out, lse = made.forward(operands)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(made.forward, (operands,), test_utils=checks)
    torch.library.opcheck(made.backward, ([*operands, out, lse, out, lse], [0, 1, 2]), test_utils=checks)
    assert str(made.forward._opoverload._schema).endswith("(Tensor[] operands) -> (Tensor, Tensor)")
    assert str(made.backward._opoverload._schema).endswith("(Tensor[] arrays, SymInt[] wanted) -> Tensor[]")


def made_for(grid, *tensors, further=None, **options):
    """The operators of this process in a ring of ``grid``."""
    _, size, after = grid
    rank = RANK // after % size
    first = RANK - rank * after
    ring = ProcessRing(tuple(first + after * place for place in range(size)), rank)
    made = request_of(*tensors[:3], ring=ring, further=further, **options)
    assert tpu.tile_world(ring) == grid
    return tpu.operators(made)


class Operators(TorchDispatchMode):
    """The tensors that reach ours inside it."""

    def __init__(self):
        super().__init__()
        self.tensors = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == "ring_attn":
            self.tensors[operator.name().rpartition("_")[0]] = args[0]
        return operator(*args, **(kwargs or {}))


@needs_torch_tpu
def test_what_reaches_the_operators_is_contiguous(torch_tpu):
    """An operator knows a tensor's shape alone. Heads first, the inputs are not; nor is the gradient of a sum, one number."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in qkv())
    with Operators() as seen:
        torch.autograd.grad(ring_attn.ring_attention(q, k, v, qkv_format="bhsd").transpose(0, 1).sum(), (q, k, v))
    assert sorted(seen.tensors) == ["ring_attn::tpu_backward", "ring_attn::tpu_forward"]
    assert all(x.is_contiguous() for tensors in seen.tensors.values() for x in tensors)


@needs_torch_tpu
def test_equal_requests_are_one_operator(torch_tpu):
    first, second = (ring_attn.ring_attention(*qkv(), causal=True) for _ in range(2))
    other = ring_attn.ring_attention(*qkv(), causal=False)
    assert first.grad_fn.call == second.grad_fn.call != other.grad_fn.call


@needs_torch_tpu
def test_a_second_derivative_raises(torch_tpu):
    inputs = qkv()
    out = ring_attn.ring_attention(*inputs)
    (gradient,) = torch.autograd.grad(out, inputs[:1], torch.empty_like(out).requires_grad_(), create_graph=True)
    with pytest.raises(NotImplementedError, match="can be differentiated once"):
        gradient.sum().backward()


@needs_torch_tpu
@pytest.mark.filterwarnings(OF_DYNAMO)
def test_torch_compile_in_one_graph(torch_tpu):
    def attention(q, k, v, ids):
        return ring_attn.ring_attention(q * 2, k, v, causal=True, q_segment_ids=ids, dropout_p=0.1, dropout_seed=3) + 1

    inputs = qkv()
    out = torch.compile(attention, backend="aot_eager", fullgraph=True)(*inputs, meta(2, 16, dtype=torch.int32, grad=False))
    assert form(out) == ((2, 16, 4, 16), torch.bfloat16, True)
    assert [form(x) for x in torch.autograd.grad(out.sum(), inputs)] == [form(x) for x in inputs]


@needs_torch_tpu
@pytest.mark.filterwarnings(OF_DYNAMO)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo's, where it goes on
def test_torch_compile_around_a_mask_mod(torch_tpu):
    def attention(q, k, v):
        return ring_attn.ring_attention(q * 2, k, v, mask_mod=lambda batch, head, q_pos, k_pos: TABLE[q_pos % 4, k_pos % 4]) + 1

    inputs = qkv()
    out = torch.compile(attention, backend="aot_eager")(*inputs)
    assert [form(x) for x in torch.autograd.grad(out.sum(), inputs)] == [form(x) for x in inputs]


@pytest.fixture(scope="module")
def eight_tpus(torch_tpu):
    from jax.experimental import topologies

    return Mesh(np.array(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices), (AXIS,))


def compiled(devices, operator, *arguments):
    """The program that ``operator`` would run, from the StableHLO that torch-tpu has of it, by the TPU's compiler."""
    program = operator._init_fn
    normal, named = program._normalize_invocation_args(arguments, {})
    exported = program.exported(*program._get_jax_placeholders(normal, named)[0])
    split = NamedSharding(devices, PartitionSpec(AXIS))
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split) for x in exported.in_avals]
    call = jax.jit(lambda *arrays: exported.call(*jax.tree.unflatten(exported.in_tree, arrays)[0]))
    return call.trace(*arrays).lower(lowering_platforms=("tpu",)).compile()


def local_forms(program):
    """Of the results on one device, which must each hold a block of rows."""
    placed = zip(jax.tree.leaves(program.out_info), jax.tree.leaves(program.output_shardings), strict=True)
    return [(sharding.shard_shape(x.shape), str(x.dtype)) for x, sharding in placed]


# Each ring of the grid sends to its next, and the last to the first.
PAIRS = {
    (1, 8, 1): "{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}",
    (2, 4, 1): "{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}",
    (2, 2, 2): "{0,2},{2,0},{1,3},{3,1},{4,6},{6,4},{5,7},{7,5}",
}


@needs_torch_tpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("grid", PAIRS)
def test_the_programs_compile_for_eight_tpus(eight_tpus, grid, dtype):
    """Both keep every operand where it is: nothing but the rotations moves."""
    inputs = [x.detach() for x in qkv(512, getattr(torch, dtype))]
    made = made_for(grid, *inputs, causal=True, layout="zigzag", lse_gradient=True)
    out, lse = made.forward(inputs)
    forward = compiled(eight_tpus, made.forward, inputs)
    backward = compiled(eight_tpus, made.backward, [*inputs, out, lse, out, lse], [0, 1, 2])
    assert local_forms(forward) == [(tuple(out.shape), dtype), (tuple(lse.shape), "float32")]
    assert local_forms(backward) == [(tuple(x.shape), dtype) for x in inputs]
    for program in (forward, backward):
        text = program.as_text()
        collectives = set(re.findall(r" (all-\w+|reduce-scatter|collective-\w+)[\w-]*\(", text))
        assert collectives == {"collective-permute"}
        assert set(re.findall(r"source_target_pairs=\{(\{\S*\})\}", text)) == {PAIRS[grid]}


@needs_torch_tpu
def test_a_program_with_every_operand_compiles_for_eight_tpus(eight_tpus):
    """Sinks, bias, mask, ids, slopes and dropout, each with its gradient where it has one."""
    length, keys = 128, 4 * 128
    ids = dict.fromkeys(
        ("q_segment_ids", "kv_segment_ids", "q_position_ids", "kv_position_ids"), meta(2, length, dtype=torch.int32, grad=False)
    )
    further = {
        "softmax_aux": meta(4, 3),
        "bias": meta(1, 4, length, keys),
        "mask": meta(2, 1, length, keys, dtype=torch.bool, grad=False),
        **ids,
        "alibi_slopes": meta(4, dtype=torch.float32),
        "dropout_seed": meta(2, dtype=torch.int32, grad=False),
        "origin": meta(2, dtype=torch.int32, grad=False),
    }
    inputs = [x.detach() for x in (*qkv(length), *further.values())]
    assert (*QKV, *further) == OPERANDS
    made = made_for((2, 4, 1), *inputs, further=further, causal=True, dropout_prob=0.1, lse_gradient=True)
    out, lse = made.forward(inputs)
    floats = [number for number, x in enumerate(inputs) if x.is_floating_point()]
    backward = compiled(eight_tpus, made.backward, [*inputs, out, lse, out, lse], floats)
    assert local_forms(compiled(eight_tpus, made.forward, inputs))[0] == (tuple(out.shape), "bfloat16")
    assert local_forms(backward) == [(tuple(inputs[number].shape), str(inputs[number].dtype)[6:]) for number in floats]
