"""When this rank came to each collective, how far its clock is off the other ranks', and what DDP itself timed.

May use what ``measure`` may. Never calls a collective, and waits for nobody without a limit.
"""
