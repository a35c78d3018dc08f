"""Measuring with torch: clocks, memory, counts, delays, collectives, device facts, and steps without data.

May use torch and ``record``. Never Lightning.
"""
