"""The instruments: what is measured besides time, each in its own stage or between the timed steps.

This package may import Lightning, torch, ``marks``, ``measure``, ``analysis``, ``processes`` and ``record``. It never
changes training.
"""
