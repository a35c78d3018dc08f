"""The command line: it reads a call, checks it, runs its verb and says how it ended.

May use everything: only here are the other packages joined. Never torch or Lightning for ``--help`` or ``--version``.
"""
