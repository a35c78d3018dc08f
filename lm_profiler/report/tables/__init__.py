"""Tables of many runs: rows, columns, layouts, and each format they are written in.

May use what ``report`` may. Never draws.
"""
