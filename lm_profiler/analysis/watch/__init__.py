"""Analyses a run in progress: changes of level, slow steps, growing memory, and where the time went.

May use what ``analysis`` may, and ``steps``. Never reads a file.
"""
