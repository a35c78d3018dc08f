"""The record of a run: its figures and types, reading and writing its files, finding runs.

May use pydantic and PyYAML. Never torch or Lightning, or anything else of ours.
"""
