"""The command line reads a call, checks it, runs its verb and reports how the call ended.

It may use everything: only here are the other packages joined. ``--help`` and ``--version`` never import torch.
"""
