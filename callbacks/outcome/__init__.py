"""What a run leaves: the record of what was measured, on all ranks, in its folder.

May use ``measure``, ``analysis`` and ``record``. Never runs in a timed step.
"""
