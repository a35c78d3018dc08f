"""Measuring with torch: clocks, memory, counts, and facts of the device.

May use torch and ``record``. Never Lightning.
"""
