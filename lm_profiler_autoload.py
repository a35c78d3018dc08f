"""What torch, Fabric and Lightning call in every program where lm_profiler is installed.

None of them guards the call, so nothing here raises. The file is no part of the package, because whoever imports a part
imports the package: without the environment variable ``LM_PROFILER`` nothing else of ours is imported.
"""

import os


def begin_search() -> None:
    """Wait for a loop of the program's own, if the profiler is asked for. torch calls this as its import ends."""
    _call_if_asked("external_loops", "begin_search")


def fabric_callbacks() -> list[object]:
    """Do the same where Fabric asks for callbacks, of which it gets none."""
    return _call_if_asked("external_loops", "external_fabric_callbacks")


def trainer_callbacks() -> list[object]:
    """Return the callbacks that Lightning adds to a Trainer: the profiler if it is asked for, or none."""
    return _call_if_asked("external_callbacks", "external_callbacks")


def _call_if_asked(module_name: str, function_name: str) -> list[object]:
    """Return the callbacks that a function of the package returns; without the variable, do not import it."""
    callbacks: list[object] | None = None
    if os.environ.get("LM_PROFILER", "") in ("", "0"):
        return []
    try:
        from importlib import import_module

        module = import_module(f"lm_profiler.{module_name}")
        callbacks = getattr(module, function_name)()
    except Exception:
        # The package is damaged. `lm_profiler run` reports that nothing was profiled.
        pass
    return callbacks or []
