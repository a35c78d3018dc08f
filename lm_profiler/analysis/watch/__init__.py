"""Analyses a run in progress: changes of level, slow steps, growing memory, and where the time went.

This package may import whatever ``analysis`` may import, plus ``steps``. It never reads a file.
"""
