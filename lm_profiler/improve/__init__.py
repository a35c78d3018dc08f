"""What ``improve`` does: which changes there are to try, the runs that try them, and what is said of it meanwhile.

May use ``sweep``, whose processes its runs are, ``processes``, ``report``, ``analysis``
and ``record``. Never torch or Lightning.
"""
