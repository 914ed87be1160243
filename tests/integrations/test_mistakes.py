"""Mistakes with a sharded model that raise no error by themselves, made by two processes (``sharded_model_mistakes_worker.py``)."""

from launch import PYTHONPATH, ROOT, torchrun


def test_mistakes_with_a_sharded_model_are_told():
    path = f"{PYTHONPATH}:{ROOT / 'tests' / 'support'}"
    said = torchrun("sharded_model_mistakes_worker.py", 2, PYTHONPATH=path, HF_HUB_OFFLINE="1")
    assert "mistakes worker: all right" in said
