"""Whether a run fits into memory, told before anything is allocated, and what would fit instead.

May use ``models`` and ``record``. Never allocates what it asks about.
"""
