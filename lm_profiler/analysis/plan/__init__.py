"""The memory that a run needs, before it runs, and the memory that a device has.

May use ``record`` and the tables of ``hardware``. Never rehearses a step itself.
"""
