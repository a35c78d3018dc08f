"""Compares a run with the limits of its hardware: peaks with their sources, and utilisation.

May use what ``analysis`` may. Never guesses: a device that no datasheet names has no peak.
"""
