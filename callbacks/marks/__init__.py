"""Where a step, its phases and its batches begin and end.

May use Lightning and ``measure.clocks``. Never a file, a print or a synchronization: this runs in timed steps.
"""
