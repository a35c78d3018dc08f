"""Plots as files, and the colours that all pictures share.

This package may import whatever ``report`` may import, plus ``tables``, and matplotlib once a picture is requested. It
never opens a display.
"""
