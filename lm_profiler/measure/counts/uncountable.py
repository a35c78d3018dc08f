"""The exceptions of a count that is impossible, or not complete."""

from __future__ import annotations


class UncountableError(Exception):
    """Raised if the FLOPs are unknown; the message is the end of "FLOPs unknown: …"."""


class NoFormulaError(UncountableError):
    """Raised for an operator whose FLOPs are missing from the count; the message is its name."""


class BrokenFormulaError(UncountableError):
    """Raised if a formula that the program registered raises, or returns no number; the message names it."""
