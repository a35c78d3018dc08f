"""Plots as files, and the colours that all pictures share.

May use what ``report`` may, ``tables``, and matplotlib once a picture is requested. Never a display.
"""
