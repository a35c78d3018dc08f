"""What looks at the loop beside the clock: memory, trace, kernels' modules, FLOPs, dtypes.

May use Lightning, torch and ``measure``. Never changes what training computes.
"""
