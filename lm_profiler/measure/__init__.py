"""Measures with torch: clocks, memory, counts, delays, collectives, device facts, and steps on fake tensors.

May use torch and ``record``. Never Lightning.
"""
