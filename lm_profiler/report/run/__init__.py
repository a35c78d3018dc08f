"""The texts about one run, or two: the end table, the kernels, the comparison.

This package may import whatever ``report`` may import, plus ``tables``. It never draws.
"""
