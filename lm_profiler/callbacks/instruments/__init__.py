"""The instruments: what is measured besides time, each in its own stage or between the timed steps.

May use Lightning, torch, ``marks``, ``measure``, ``analysis``, ``processes`` and ``record``. Never changes training.
"""
