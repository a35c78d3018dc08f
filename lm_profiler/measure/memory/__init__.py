"""Peaks, levels and holdings of memory, and the allocator's history.

May use what ``measure`` may, ``clocks`` and psutil. Never frees what it measures.
"""
