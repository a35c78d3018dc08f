"""Takes marks on two clocks, the host's and the device's, and computes the times between them.

May use what ``measure`` may. Never synchronizes within the loop.
"""
