"""Compares a run with the limits of its hardware: peaks with their sources, and utilisation.

This package may import whatever ``analysis`` may import. It never guesses: a device that no datasheet names has no
peak.
"""
