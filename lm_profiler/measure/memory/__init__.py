"""Peaks, levels and holdings of memory, and the allocator's history.

May use torch. Never frees what it measures.
"""
