"""Adds delays of a known length to a loader's workers or to a device's stream.

May use what ``measure`` may, and ``clocks``. Never decides where to delay or for how long.
"""
