"""What is measured besides time: memory, trace, modules of kernels, FLOPs, dtypes, what delays cost, when the
ranks come to their collectives.

May use Lightning, torch, ``marks``, ``measure``, ``analysis.trace``, ``analysis.why``, ``analysis.ranks``,
``processes`` and ``record``. Never changes what training computes.
"""
