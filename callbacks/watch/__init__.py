"""What stays after the stages until training ends: marks, a writer beside training, and traces on demand.

May use Lightning, torch, ``marks``, ``instruments``, ``measure``, ``analysis`` and ``record``. Never prints, and never
asks another rank: summaries of others are read from their files.
"""
