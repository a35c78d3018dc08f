"""Compares runs, to decide whether B is faster than A: the differences, their size, and their uncertainty.

May use what ``analysis`` may, ``hardware`` and ``steps``. Never prints.
"""
