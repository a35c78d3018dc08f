"""Takes marks on two clocks, the host's and the device's, and computes the times between them.

This package may import whatever ``measure`` may import. It never synchronizes within the loop.
"""
