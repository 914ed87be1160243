"""Mistakes with a sharded model that raise no error by themselves, made by two processes, and what ``cp.verify`` says."""

import pytest
from launch import PYTHONPATH, ROOT, torchrun

PATH = f"{PYTHONPATH}:{ROOT / 'tests' / 'support'}"


@pytest.mark.parametrize("worker", ["sharded_model_mistakes", "verify"])
def test_they_are_told(worker):
    assert "worker: all right" in torchrun(f"{worker}_worker.py", 2, PYTHONPATH=PATH, HF_HUB_OFFLINE="1")
