"""Who works, who waits, and for whom: from the marks of all ranks and their arrivals at collectives.

May use what ``analysis`` may. Never reads a file.
"""
