"""Finds which ranks work and which wait for which, from the marks of all ranks and their arrivals at collectives.

May use what ``analysis`` may. Never reads a file.
"""
