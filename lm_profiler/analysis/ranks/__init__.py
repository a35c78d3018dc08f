"""Which ranks work, which wait, and for whom: from the marks of all ranks and their arrivals at collectives.

May use what ``analysis`` may. Never reads a file.
"""
