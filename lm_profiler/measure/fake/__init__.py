"""Fake tensors, which have shapes and no data, and the bytes that they would take.

This package may import whatever ``measure`` may import, plus ``memory``. It never allocates or computes what it counts.
"""
