"""What is counted while a step runs: FLOPs, compilations, lines that synchronize.

May use what ``measure`` may, and ``clocks``. Never runs the step again.
"""
