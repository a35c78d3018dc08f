"""The command line reads a call, checks it, runs its verb and reports how the call ended.

May use everything: only here are the other packages joined. Never torch or Lightning for ``--help`` or ``--version``.
"""
