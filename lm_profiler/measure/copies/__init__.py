"""What is asked of a copy of the module: FLOPs and bytes of a step that was not seen, and how far low precision is off.

May use what ``measure`` may, ``counts`` and ``device``. Never touches the module itself.
"""
