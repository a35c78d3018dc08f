"""The instruments: what is measured besides time, each in a stage of its own or between the timed steps.

May use Lightning, torch, ``marks``, ``measure``, ``analysis.trace``, ``analysis.why``, ``analysis.ranks``,
``processes`` and ``record``. Never changes what training computes.
"""
