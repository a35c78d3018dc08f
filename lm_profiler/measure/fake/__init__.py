"""Fake tensors, which have shapes and no data, and the bytes that they would take.

May use what ``measure`` may, and ``memory``. Never allocates or computes what it counts.
"""
