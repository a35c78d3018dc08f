"""Measures memory: peaks, levels, what holds it, traffic, and the allocator's history.

May use what ``measure`` may, ``clocks`` and psutil. Never frees what it measures.
"""
