"""Plots as files, and the page with charts that works without a network.

May use matplotlib and plotly, only once a picture is asked for, and ``tables``. Never a display.
"""
