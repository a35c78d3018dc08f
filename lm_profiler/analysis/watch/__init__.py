"""What is told of a run while it goes on: changes of level, slow steps, memory that grows, and where the time went.

May use what ``analysis`` may, and ``steps``. Never reads a file.
"""
