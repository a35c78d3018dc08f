"""The result of a run: the record of what was measured on all ranks, in its folder.

May use what ``callbacks`` may, and ``instruments``. Never runs in a timed step.
"""
