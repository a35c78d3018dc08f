"""The command line: read a call, check it, run its verb, and report how it ended.

Wherever a wrong call is detected, UsageError is raised, and ``main`` prints it.

May use all other packages. Never torch or Lightning for ``--help`` or ``--version``.
"""
