"""Measures with torch: clocks, memory, counts, delays, collectives, device facts, and steps on fake tensors.

This package may import torch and ``record``. It never imports Lightning.
"""
