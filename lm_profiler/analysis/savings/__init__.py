"""Finds time that could be saved: one function per finding.

``ranking`` runs them all and puts the findings in order. The other modules hold the functions, by what costs the time.
This package may import whatever ``analysis`` may import.
"""
