"""Finds operators that a step need not compute, from what reads their results and from what their operands contain.

This package may import whatever ``analysis`` may import. It knows operator calls by number and storage, and handles no
tensors.
"""
