"""Finds which ranks work and which wait for which, from the marks of all ranks and their arrivals at collectives.

This package may import whatever ``analysis`` may import. It never reads a file.
"""
