"""Explains the time of a step: where each nanosecond of a traced step went, and what it should have cost.

May use what ``analysis`` may, ``trace``, ``hardware`` and ``steps``. Never reads a file.
"""
