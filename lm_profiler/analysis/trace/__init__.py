"""A trace's events as intervals, kernels and their kinds.

This package may import whatever ``analysis`` may import. It never holds a whole trace as text.
"""
