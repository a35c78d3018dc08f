"""Searches for what makes a step faster: which run to ask for next, and when its figures decide.

May use ``compare``, ``steps`` and what ``analysis`` may. Never runs anything, and has no clock: whoever drives the
search runs what it asks for.
"""
