"""The request: what every backend is handed, in one order and the same words, and which backend that is."""

from types import SimpleNamespace

import pytest
import torch

from jax_core.operands import Operands
from jax_core.options import Options
from torch_bridge.attention.operands import gather
from torch_bridge.attention.operation import OPERANDS, Attention
from torch_bridge.backends import shared_memory, torch_tpu
from torch_bridge.backends.dispatch import backend_of
from torch_bridge.backends.operation import Request, TensorSpec, specs_of
from torch_bridge.call.programs import rename_args
from torch_bridge.mesh.protocol import tensors_per_sequence
from torch_bridge.mesh.rings import ProcessRing

ALONE = ProcessRing((0,), 0)
LOCAL = ("local", None)


def tensors(**more):
    q, k = torch.zeros(2, 4, 2, 8), torch.zeros(2, 4, 1, 8)
    return dict(query=q, key=k, value=k) | more


def request(ring=ALONE, specs=None, **options):
    specs = specs or specs_of([*tensors().values()])
    return Request(
        ring, Attention(Options(**options)), tuple(TensorSpec(*form) if form else None for form in specs), torch.device("cpu")
    )


def test_the_device_chooses_the_backend():
    assert backend_of(SimpleNamespace(type="tpu")) is torch_tpu
    for device in ("cpu", "cuda", "meta"):
        assert backend_of(torch.device(device)) is shared_memory


def test_operands_come_in_one_order_and_ids_for_both_sides():
    ids = torch.arange(4).expand(2, 4)
    given = tensors(kv_segment_ids=ids, softmax_aux=torch.zeros(2))
    options, arrays = gather(shared_memory, LOCAL, Operands(**given), 3, Options(causal=True))
    assert options == Options(causal=True)
    found = dict(zip(OPERANDS, arrays, strict=True))
    assert found["query"] is given["query"] and found["softmax_aux"] is given["softmax_aux"]
    assert found["q_segment_ids"] is found["kv_segment_ids"] and found["q_segment_ids"].dtype == torch.int32
    assert found["dropout_seed"].tolist() == [3, 0]
    there = {"query", "key", "value", "softmax_aux", "q_segment_ids", "kv_segment_ids", "dropout_seed"}
    assert {name for name, array in found.items() if array is not None} == there


def test_a_mask_functions_arrays_are_further_operands():
    import jax.numpy as jnp

    table, number = jnp.arange(6), jnp.asarray(3)

    def seen(batch, head, q_pos, k_pos):
        return (table[q_pos] <= k_pos) & (k_pos < number)

    options, arrays = gather(shared_memory, LOCAL, Operands(**tensors()), None, Options(mask_mod=seen))
    assert options.mask_mod is None and len(options.predicates) == 1
    further = arrays[len(OPERANDS) :]
    assert sorted(x.tolist() for x in further) == [[0, 1, 2, 3, 4, 5], [3]]
    lifted = request(specs=specs_of(arrays), predicates=options.predicates).operation.named(arrays)
    assert lifted.predicate_arrays == (further,) and lifted.query is arrays[0]


def test_a_mask_function_without_arrays_has_its_place():
    options, arrays = gather(shared_memory, LOCAL, Operands(**tensors()), None, Options(mask_mod=lambda b, h, q, k: q >= k))
    built = ((torch.zeros(1),),)
    assert request(predicates=options.predicates).operation.named(arrays, built).predicate_arrays == ((), *built)
    assert request().operation.named(arrays, built).predicate_arrays == built


def test_equal_requests_are_one_and_say_the_same():
    assert request(causal=True) == request(causal=True) and hash(request(causal=True)) == hash(request(causal=True))
    assert request(causal=True) != request(causal=False)
    assert str(request(causal=True)) == str(request(causal=True)) != str(request(causal=False))
    assert "query [2, 4, 2, 8] torch.float32" in str(request(causal=True)) and "'causal': True" in str(request(causal=True))


def test_the_forms_of_results():
    wide = [((2, 4, 2, 8), torch.float64), ((2, 6, 1, 8), torch.float64), ((2, 6, 1, 5), torch.float64)]
    assert request(specs=wide).results == (((2, 4, 2, 5), torch.float64), ((2, 2, 4), torch.float64))
    half = [(shape, torch.bfloat16) for shape, _ in wide]
    assert request(specs=half).results == (((2, 4, 2, 5), torch.bfloat16), ((2, 2, 4), torch.float32))


@pytest.mark.parametrize(
    ("batch", "queries", "keys", "empty"), [(2, 4, 4, False), (0, 4, 4, True), (2, 0, 4, True), (2, 4, 0, True)]
)
def test_what_is_empty(batch, queries, keys, empty):
    specs = [((batch, length, 2, 8), torch.float32) for length in (queries, keys, keys)]
    asked = request(specs=specs)
    assert (asked.operation.in_torch(asked, None) is not None) == empty


def test_how_many_tensors_make_a_sequence():
    assert tensors_per_sequence(ProcessRing((0, 1, 2), 1)) == 3
    assert tensors_per_sequence(SimpleNamespace(size=4, ranks_here=range(4))) == 1


def test_words_are_turned_whole():
    names = (("query", "q"), ("softmax_aux", "sinks"))
    assert rename_args("query heads, query_dim, queries, softmax_aux", names) == "q heads, query_dim, queries, sinks"
    assert rename_args("query", ()) == "query"
