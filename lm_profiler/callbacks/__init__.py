"""The Lightning callback that profiles the training of any ``LightningModule``.

``trainer = Trainer(callbacks=profiling_callbacks(warmup_steps=5, measure_steps=40))``

This package may import Lightning, ``measure``, ``analysis``, ``processes`` and ``record``, and for a run's end
``report`` and ``tensorboard``. It never imports ``models`` or ``training``. Modules that profile other loops than the
Trainer's do not import Lightning, and neither does this module until a name of the callback is requested.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lm_profiler.usage_error import NEEDS_POSIX

if sys.platform == "win32":
    raise ImportError(NEEDS_POSIX)
if __name__ != "lm_profiler.callbacks":
    raise ImportError(
        f"the folder callbacks/ of lm_profiler was imported as {__name__!r}: expected lm_profiler.callbacks; "
        "import that name, or run from another folder"
    )

if TYPE_CHECKING:
    from lm_profiler.callbacks.instruments.profiling_options import (
        ActionsOptions,
        ExportOptions,
        MemoryOptions,
        NumericsOptions,
        StageOptions,
        TraceOptions,
        WatchOptions,
    )
    from lm_profiler.callbacks.profiling import TrainingProfiler
    from lm_profiler.callbacks.shortcut import profiling_callbacks

__all__ = [
    "ActionsOptions",
    "ExportOptions",
    "MemoryOptions",
    "NumericsOptions",
    "StageOptions",
    "TraceOptions",
    "TrainingProfiler",
    "WatchOptions",
    "profiling_callbacks",
]

_MODULES = {"TrainingProfiler": "profiling", "profiling_callbacks": "shortcut"}
# the module of all other names of ``__all__``
_OPTIONS = "instruments.profiling_options"


def __getattr__(name: str) -> Any:
    """Import a name of ``__all__`` from its module only when it is used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_MODULES.get(name, _OPTIONS)}")
    return getattr(module, name)
