"""Facts of the machine: its names and versions, its own ceiling, its GPUs' readings, and who else used it.

May use what ``measure`` may, ``clocks`` and ``memory``, psutil and NVML. Never waits for the device within the loop.
"""
