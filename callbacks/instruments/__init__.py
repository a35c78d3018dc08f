"""What looks at the loop beside the clock: memory, trace, kernels' modules, FLOPs, dtypes.

May use Lightning, torch, ``marks``, ``measure``, ``analysis.trace`` and ``record``. Never changes what training
computes.
"""
