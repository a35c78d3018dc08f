"""Statistics of steps: intervals, warm-up, steadiness, odd steps, shares.

This package may import whatever ``analysis`` may import, plus ``hardware``. It never reads a file.
"""
