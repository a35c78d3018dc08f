"""Plots as files, and the colours that every picture has.

May use what ``report`` may, ``tables``, and matplotlib once a picture is asked for. Never a display.
"""
