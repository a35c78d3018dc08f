"""The callbacks that Lightning adds to each Trainer of a program that ``lm_profiler run`` has started.

If ``LM_PROFILER`` is set, ``lm_profiler_autoload`` imports this module when a Trainer is made. An error would reach the
program, so the module only imports the standard library and ``external_loops``, and raises nothing.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from lm_profiler.external_loops import VARIABLE

# the name of a link in the folder that the processes of a program share; it names the Trainer that is profiled
CLAIMED = "claimed"


def external_callbacks() -> list[Any]:
    """Return the profiler in a list, or an empty list if it is not requested or cannot be made."""
    try:
        request = os.environ.get(VARIABLE, "").strip()
        if request in ("", "0"):
            return []
        # by name, because an import statement would make this module depend on the callbacks
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
