"""The arithmetic: numbers in, numbers and words out.

May use numpy, scipy and ``record``. Never torch or Lightning, and never prints.
"""
