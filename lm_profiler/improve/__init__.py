"""Improve a run: the changes to try, the runs that try them, and the display of progress.

May use ``sweep``, which starts its runs, ``processes``, ``report``, ``analysis`` and ``record``. Never torch or
Lightning.
"""
