"""Measures collectives: when this rank came to each, how far the ranks' clocks differ, and what DDP itself timed.

May use what ``measure`` may. Never calls a collective, and never waits without a limit.
"""
