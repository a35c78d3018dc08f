"""Marks where a step, its phases and its batches begin and end.

May use Lightning, torch, ``measure.clocks``, ``measure.boundary`` and names of ``analysis.watch`` and ``record``.
Never a file, a print or a synchronization: this runs in timed steps.
"""
