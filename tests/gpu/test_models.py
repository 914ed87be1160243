"""Whole models, and the other ways into a ring, on all GPUs in bfloat16 (``models_worker.py``, ``faces_worker.py``)."""

import pytest

from tests.gpu.jobs import RANKS, need, torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
MODELS = ("Llama", "Mistral", "Gemma3", "GptOss", "Llama4", "DeepseekV3", "Qwen3Moe", "OlmoHybrid", "Bamba")


@pytest.mark.parametrize("model", MODELS)
def test_errors_of_a_model_are_those_of_bfloat16(model):
    pytest.importorskip("transformers")
    need(2)
    fine, said = torchrun(RANKS, "tests/gpu/models_worker.py", "--models", model, timeout=880)
    assert fine and "gradients" in said, said
    print(said)


@pytest.mark.parametrize(("model", "package"), [("OlmoHybrid", "fla"), ("Bamba", "mamba_ssm")])
def test_layers_with_a_state_by_the_kernels_of_others(model, package):
    pytest.importorskip("transformers")
    pytest.importorskip(package)
    ways = ("plain", "left", "packed", "decoded")
    fine, said = torchrun(RANKS, "tests/gpu/models_worker.py", "--kernels", "--models", model, "--ways", *ways, timeout=880)
    if "no kernels" in said:
        pytest.skip(said)
    assert fine and "gradients" in said, said
    print(said)


def test_other_ways_into_a_ring():
    pytest.importorskip("transformers")
    need(2)
    fine, said = torchrun(RANKS, "tests/gpu/faces_worker.py", timeout=880)
    assert fine and "other_batches: told" in said, said
    print(said)


def test_families_generate_as_one_gpu_does():
    """The tokens of 20 families, greedy and by beams, with a cache over the ring and with transformers' own."""
    pytest.importorskip("transformers")
    need(2)
    fine, said = torchrun(RANKS, "tests/support/workers/cached_generation_worker.py", "cuda", timeout=880)
    assert fine and said.count("all right") == RANKS, said
    print(said)
