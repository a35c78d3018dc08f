"""The command line: reads a call, checks it, runs its verb and reports how the call ended.

A wrong call raises UsageError, wherever it is noticed; ``main`` prints it.

May use everything: it joins the other packages. Never torch or Lightning for ``--help`` or ``--version``.
"""
