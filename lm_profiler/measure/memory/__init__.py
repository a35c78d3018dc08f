"""Measures memory: peaks, levels, what holds it, traffic, and the allocator's history.

This package may import whatever ``measure`` may import, plus ``clocks`` and psutil. It never frees what it measures.
"""
