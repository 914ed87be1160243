"""transformers' ``generate`` with a cache over a ring beside the same with transformers' own cache, in one process."""

from typing import Any

import tiny_hybrids
import tiny_transformers as tiny
import torch
from torch import Tensor

from ring_attn.integrations.transformers import context_parallel

LENGTH, ROOM = 21, 64
SETTINGS: dict[str, Any] = dict(max_new_tokens=7, do_sample=False, pad_token_id=0, eos_token_id=None)
TOLERANCE = {"cpu": 4e-6, "cuda": 2e-5}  # of logits about 1, float32


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    model = (tiny.CAUSAL | tiny_hybrids.FAMILIES)[name]().eval()
    model.config.output_router_logits = False
    return model


def prompt() -> dict[str, Tensor]:
    """Two rows, of which the second is padded on the left."""
    ids = torch.randint(3, 60, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generated(model: Any, *, seed: int = 0, **options: Any) -> tuple[Tensor, Tensor]:
    """Tokens, and the logits that they were chosen by."""
    torch.manual_seed(seed)
    given = {name: x.to(model.device) for name, x in prompt().items()}
    found = model.generate(**{**given, **SETTINGS, **options}, return_dict_in_generate=True, output_logits=True)
    return found.sequences, torch.stack(found.logits)


def compare(name: str, mesh: Any, *cases: dict[str, Any], device: str = "cpu") -> None:
    """For each case, options of generate: the same tokens, and logits within rounding."""
    model = model_of(name).to(device)
    expected = [generated(model, **case) for case in cases]
    cp = context_parallel(model, mesh)
    for case, (tokens, logits) in zip(cases, expected, strict=True):
        cache = cp.cache(ROOM)
        found = generated(model, **{cp.plan.cache_name: cache}, **case)
        assert torch.equal(found[0], tokens), (name, case, found[0].tolist(), tokens.tolist())
        torch.testing.assert_close(found[1], logits, rtol=0, atol=TOLERANCE[device] * float(logits.abs().max()))
        assert cache.seen == tokens.shape[1] - 1
    cp.remove()
