"""Searches for what makes a step faster: which run to ask for next, and when its figures decide.

Pure arithmetic: whoever drives the search runs what it asks for. Uses `analysis.compare` and numpy; never torch, a file
or a clock.
"""
