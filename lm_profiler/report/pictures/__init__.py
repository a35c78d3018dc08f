"""Plots as files, and the colours that every picture has.

May use matplotlib, only once a picture is asked for, and ``tables``. Never a display.
"""
