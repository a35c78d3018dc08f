"""The record of a run: its figures and types, reading and writing its files, finding runs.

This package may import pydantic and PyYAML. It never imports torch or Lightning, or anything else of ours.
"""
