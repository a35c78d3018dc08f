"""Improve a run: the changes to try, the runs that try them, and the display of progress.

It may use ``sweep``, which starts its runs, ``processes``, ``report``, ``analysis`` and ``record``. It never imports
torch or Lightning.
"""
