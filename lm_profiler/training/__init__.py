"""The profiled training: a LightningModule, its fake data, and options of torch for users' modules.

This package may import Lightning, ``measure``, ``models`` and ``record``. It never imports ``callbacks`` or ``report``.
Lightning is imported only when its parts are requested.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lm_profiler.training.attention_alone import AttentionAlone, EmptyBatches
    from lm_profiler.training.data_parallel import WrappedDDP
    from lm_profiler.training.fake_tokens import FakeTokens
    from lm_profiler.training.language_model import LanguageModel

__all__ = [
    "AttentionAlone",
    "EmptyBatches",
    "FakeTokens",
    "LanguageModel",
    "WrappedDDP",
]


_MODULES = {
    "AttentionAlone": "attention_alone",
    "EmptyBatches": "attention_alone",
    "FakeTokens": "fake_tokens",
    "LanguageModel": "language_model",
    "WrappedDDP": "data_parallel",
}


def __getattr__(name: str) -> Any:
    """Import a name of ``__all__`` from its module only when it is used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_MODULES[name]}")
    return getattr(module, name)
