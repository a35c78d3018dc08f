"""Counts what happens in a step: FLOPs, traffic, compilations, synchronizing lines, batches, CPU time.

This package may import whatever ``measure`` may import, plus ``clocks`` and ``memory``. It never runs the step again.
"""
