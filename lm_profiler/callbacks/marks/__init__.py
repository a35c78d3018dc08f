"""Marks where a step, its phases and its batches begin and end.

This package may import Lightning, torch, ``measure.clocks``, ``measure.boundary`` and names of ``analysis.watch`` and
``record``. It runs in timed steps, so it never writes a file, prints or synchronizes.
"""
