"""The texts about one run, or two: the end table, the kernels, the comparison.

May use what ``report`` may, and ``tables``. Never draws.
"""
