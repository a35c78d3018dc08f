"""What Lightning calls the precisions."""

from __future__ import annotations

_ALIASES = {"64": "64-true", "32": "32-true", "None": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}
"""Lightning's shorter names (lightning/fabric/connector.py, _convert_precision_to_unified_args)."""


def full_name(precision: object) -> str:
    """The whole name of a precision as a config may give it: None and ``32`` are ``32-true``."""
    return _ALIASES.get(str(precision), str(precision))
