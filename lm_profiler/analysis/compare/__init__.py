"""Is B faster than A? What differs, by how much, and how sure that is.

May use what ``analysis`` may, ``hardware`` and ``steps``. Never prints.
"""
