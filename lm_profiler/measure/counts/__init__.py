"""What is counted while a step runs: FLOPs, compilations, lines that synchronize.

May use torch. Never runs the step again.
"""
