"""Decoder-only language models.

May use torch and einops. Never Lightning, or anything else of ours. Only what is asked for is imported: ``config``
stays free of torch, for commands that a person waits for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lm_profiler.models.config import PRESETS, AttentionName, TransformerConfig, preset
    from lm_profiler.models.transformer import Transformer

__all__ = ["PRESETS", "AttentionName", "Transformer", "TransformerConfig", "preset"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'transformer' if name == 'Transformer' else 'config'}"), name)
