"""Tables of many runs: rows, columns, layouts, and each format they are written in.

This package may import whatever ``report`` may import. It never draws.
"""
