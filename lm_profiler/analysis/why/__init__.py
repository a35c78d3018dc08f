"""From the ideal step to the measured one: what each nanosecond of a traced step went to, and what it should have cost.

May use what ``analysis`` may, ``trace`` and ``hardware``. Never reads a file.
"""
