"""Explains the time of a step: where each nanosecond of a traced step went, and what it should have cost.

This package may import whatever ``analysis`` may import, plus ``trace``, ``hardware`` and ``steps``. It never reads a
file.
"""
