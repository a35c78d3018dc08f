"""Facts of the machine: its names and versions, its own ceiling, its GPUs' readings, and who else used it.

May use torch, psutil and NVML. Never waits for the device within the loop.
"""
