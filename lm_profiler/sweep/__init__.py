"""Runs many cells: what is to run, in which order, in processes of their own, and what became of them."""
