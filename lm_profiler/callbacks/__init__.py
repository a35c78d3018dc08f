"""The Lightning callback that profiles the training of any ``LightningModule``.

``trainer = Trainer(callbacks=profiling_callbacks(warmup_steps=5, measure_steps=40))``

May use Lightning, ``measure``, ``analysis``, ``processes`` and ``record``, and for a run's end ``report`` and
``tensorboard``. Never ``models`` or ``training``.
"""

import sys

from lm_profiler.usage_error import NEEDS_POSIX

if sys.platform == "win32":
    raise ImportError(NEEDS_POSIX)
if __name__ != "lm_profiler.callbacks":
    raise ImportError(
        f"the folder callbacks/ of lm_profiler was imported as {__name__!r}: expected lm_profiler.callbacks; "
        "import that name, or run from another folder"
    )

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
