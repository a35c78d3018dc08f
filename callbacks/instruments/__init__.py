"""What is measured besides time: memory, trace, modules of kernels, FLOPs, dtypes.

May use Lightning, torch, ``marks``, ``measure``, ``analysis.trace`` and ``record``. Never changes what training
computes.
"""
