"""The callbacks that Lightning adds to each Trainer of a program which ``lm_profiler run`` has started.

If ``LM_PROFILER`` is set, ``lm_profiler_autoload`` imports this module where a Trainer is made, and Lightning does not
guard that call. So the module imports the standard library and ``external_loops`` alone, and raises nothing.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from lm_profiler.external_loops import VARIABLE

# name of a file in the folder that the processes of a program share: one of their Trainers is profiled
CLAIMED = "claimed"


def external_callbacks() -> list[Any]:
    """Return the profiler in a list, or an empty list if it is not requested or cannot be made."""
    try:
        request = os.environ.get(VARIABLE, "").strip()
        if request in ("", "0"):
            return []
        # By name: an import statement would be a dependency of this module on the callbacks.
        callbacks: list[Any] = import_module(
            "lm_profiler.callbacks.shortcut"
        ).admitted_callbacks(request)
        return callbacks
    except Exception as error:
        try:
            text = " ".join(str(error).split())
            print(
                f"lm_profiler: the run is not profiled: {type(error).__name__}: {text}",
                file=sys.stderr,
            )
        except Exception:  # stderr is closed
            pass
        return []
