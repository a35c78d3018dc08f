"""Finds operators that a step need not compute, from what reads their results and from what their operands contain.

May use what ``analysis`` may. Knows calls of operators by number and storage, and no tensors.
"""
