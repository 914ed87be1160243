"""Measurements of the library beside its peers, started from the repository's root as modules:

    python -m benchmarks.one_gpu.compare
    torchrun --standalone --nproc-per-node 8 -m benchmarks.ring.compare

harness     what all of them share: a process among others, timing, the report
one_gpu     kernels on one GPU
ring        a ring of GPUs: its speed, overlap, memory, balance, and generation over it
training    whole models
host        what the host does: of each call, and of the first
cpu, tpu    what can be measured without a GPU
results     what was measured; NOTES.md: what was tried, and what came of it
"""
