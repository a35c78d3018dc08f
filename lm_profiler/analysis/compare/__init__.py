"""Compares runs, to decide whether B is faster than A: the differences, their size, and their uncertainty.

This package may import whatever ``analysis`` may import, plus ``hardware`` and ``steps``. It never prints.
"""
