"""Marks on two clocks, the host's and the device's, and the times between them.

May use torch. Never synchronizes.
"""
