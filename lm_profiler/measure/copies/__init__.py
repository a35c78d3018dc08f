"""What is asked of a copy of the module: FLOPs of a compiled step, and how far low precision is off.

May use what ``measure`` may, ``counts`` and ``device``. Never touches the module itself.
"""
