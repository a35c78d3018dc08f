"""The memory that a run needs, before it runs, and the memory that a device has.

This package may import ``record`` and the tables of ``hardware``. It never rehearses a step itself.
"""
