"""Counts what happens in a step: FLOPs, traffic, compilations, synchronizing lines, batches, CPU time.

May use what ``measure`` may, ``clocks`` and ``memory``. Never runs the step again.
"""
