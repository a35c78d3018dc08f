"""Child processes: one that answers a question (``child``), the ranks of a measurement, the cells of a sweep.

This package may import psutil. It never imports torch, or anything else of ours; the fork server imports only the
modules that its caller names. Whatever is unpickled comes from a pipe or from an unnamed file, to which no other
process can write.
"""
