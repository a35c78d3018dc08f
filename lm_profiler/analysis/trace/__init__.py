"""A trace's events as intervals, kernels and their kinds.

May use what ``analysis`` may. Never holds a whole trace as text.
"""
