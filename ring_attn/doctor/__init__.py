"""``python -m ring_attn doctor``: what is installed, what of it can run here, whether it is right, and what has tripped others.

``command`` asks each check in turn and prints; a check returns findings. What may hang or crash (``kernels``, ``ranks``) runs in a
process or a thread with a limit of time.
"""
