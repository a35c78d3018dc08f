"""The texts about one run, or two: the end table, the kernels, the comparison.

May use ``tables``. Never draws.
"""
