"""Child processes: one that answers a question (``child``), and a server that forks the cells of a sweep.

May use ``record``, whose files appear whole. Never torch, nor what nobody has loaded: the fork server is told what to
load. Whatever is unpickled comes from a pipe, or from a file without a name, that nobody else can write to.
"""
