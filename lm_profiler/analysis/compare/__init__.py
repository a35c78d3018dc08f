"""Is B faster than A? Compares runs: the differences, their size, and their uncertainty.

May use what ``analysis`` may, ``hardware`` and ``steps``. Never prints.
"""
