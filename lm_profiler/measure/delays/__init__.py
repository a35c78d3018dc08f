"""Delays of a known length, put into a loader's workers or into a device's stream.

May use what ``measure`` may, and ``clocks``. Never decides where or how long.
"""
