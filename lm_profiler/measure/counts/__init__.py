"""Counts what happens in a step: FLOPs, traffic, compilations, synchronizing lines, batches, CPU time.

May use what ``measure`` may, and ``clocks``. Never runs the step again.
"""
