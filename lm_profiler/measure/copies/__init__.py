"""Copies modules, and finds what a run's precision does to the numbers of a step.

May use torch, ``record`` and ``device``. Never changes the module that is copied.
"""
