"""The training loop that is profiled: a LightningModule, its fake data, and what they must hold in memory.

Lightning is imported only when its parts are asked for. The function `footprint` stays in the module of its
name, which imports neither torch nor Lightning: `from lm_profiler.training.fits.states import footprint`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lm_profiler.training.attention_alone import AttentionAlone, EmptyBatches
    from lm_profiler.training.fake_tokens import FakeTokens
    from lm_profiler.training.language_model import LanguageModel

__all__ = ["AttentionAlone", "EmptyBatches", "FakeTokens", "LanguageModel"]

_HOMES = {
    "AttentionAlone": "attention_alone",
    "EmptyBatches": "attention_alone",
    "FakeTokens": "fake_tokens",
    "LanguageModel": "language_model",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
