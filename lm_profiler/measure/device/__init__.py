"""Reads facts of the machine: names and versions, measured ceilings, its GPUs' sensors, and other programs on it.

May use what ``measure`` may, ``clocks`` and ``memory``, psutil and NVML. Never waits for the device within the loop.
"""
