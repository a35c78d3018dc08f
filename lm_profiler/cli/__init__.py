"""The command line reads a call, checks it, runs its verb and reports how the call ended.

What is wrong with a call raises UsageError, wherever it is noticed; ``main`` prints it.

May use everything: only here are the other packages joined. Never torch or Lightning for ``--help`` or ``--version``.
"""
