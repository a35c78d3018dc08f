"""Improve a run: the changes to try, the runs that try them, and the display of progress.

This package may import ``sweep``, which starts its runs, ``processes``, ``report``, ``analysis`` and ``record``. It
never imports torch or Lightning.
"""
