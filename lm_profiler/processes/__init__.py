"""Child processes: one that answers a question (``child``), and a server that forks the cells of a sweep.

Uses no other room. Never imports torch; the fork server imports only what it is told to.
Whatever is unpickled comes from a pipe or from an unnamed file, to which no other process can write.
"""
