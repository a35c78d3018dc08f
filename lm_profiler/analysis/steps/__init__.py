"""Statistics of steps: intervals, warm-up, steadiness, odd steps, shares.

May use what ``analysis`` may, and ``hardware``. Never reads a file.
"""
