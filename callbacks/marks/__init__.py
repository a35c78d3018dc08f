"""Marks where a step, its phases and its batches begin and end.

May use Lightning, torch, ``measure.clocks``, ``measure.counts``, ``measure.boundary``, names of
``record.quantities`` and the record's types (``record.run``).
Never a file, a print or a synchronization: this runs in timed steps.
"""
