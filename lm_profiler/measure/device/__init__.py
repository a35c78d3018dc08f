"""Reads facts of the machine: names and versions, measured ceilings, its GPUs' sensors, and other programs on it.

This package may import whatever ``measure`` may import, plus ``clocks`` and ``memory``, psutil and NVML. It never waits
for the device within the loop.
"""
