"""Copies modules, and finds what a run's precision does to the numbers of a step.

This package may import torch, ``record`` and ``device``. It never changes the module that is copied.
"""
