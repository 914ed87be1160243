"""Layers with a state along the sequence (DESIGN.md, "Layers with a state"): what is exchanged between the pieces of a sharded
sequence, and chunked operators around it. Beside the strategies of attention, under a contract of its own.

``pieces`` is the layout as a table. ``halo``, ``prefix`` and ``heads`` are the exchanges, and ``choice`` is between the last two;
``documents`` says where documents begin, and what lies before each piece of one.
``chunks`` turns inputs into affine maps, ``passes`` is the forward and the backward around any of them, ``operators`` is the list
of operators, and ``convolution`` the one that needs a halo alone, or what ``documents`` finds.
"""
