"""The command line: read a call, check it, run its verb, and report how it ended.

Wherever a wrong call is detected, UsageError is raised, and ``main`` prints it.

This package may import all other packages. It never imports torch or Lightning for ``--help`` or ``--version``.
"""
