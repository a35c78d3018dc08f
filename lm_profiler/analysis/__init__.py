"""The arithmetic: numbers in, numbers and words out.

This package may import numpy, scipy and ``record``. It never imports torch or Lightning, and never prints.
"""
