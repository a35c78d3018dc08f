"""Waits for the training loop of a program that ``lm_profiler run`` has started, if no Lightning Trainer runs it.

If ``LM_PROFILER`` is set, ``lm_profiler_autoload`` calls ``begin_search`` at the end of ``import torch``. An exception
would make that import fail, so the module only imports ``os``, and raises nothing. It adds one pair of torch's hooks
until the first optimizer steps.
"""

import os

# the environment variable that requests the profiler: a JSON object that ``callbacks.run_request`` reads
VARIABLE = "LM_PROFILER"


def begin_search() -> None:
    """If the environment requests it, wait for the first optimizer that steps, and profile its loop."""
    if os.environ.get(VARIABLE, "").strip() in ("", "0"):
        return
    try:
        # by name, because an import statement would make this module depend on the callbacks
        from importlib import import_module

        hooks = import_module("lm_profiler.callbacks.marks.torch_hooks")
        hooks.OPTIMIZER_HOOKS.attach_provisionally(_profile_loop_of)
    except Exception as error:
        _report(error)


def external_fabric_callbacks() -> list[object]:
    """Begin the search when Lightning Fabric requests callbacks, in case torch's autoload is off; return none."""
    begin_search()
    return []


def _profile_loop_of(optimizer: object) -> None:
    """Profile the loop of ``optimizer``, which is about to step, with the options in the environment.

    torch calls this in a hook of the step, which no error may reach.
    """
    try:
        from importlib import import_module

        admitted_loop = import_module("lm_profiler.callbacks.admitted_loop")
        admitted_loop.profile_loop_of(optimizer, os.environ.get(VARIABLE, ""))
    except Exception as error:
        _report(error)


def _report(error: Exception) -> None:
    """Print that the loop is not profiled, and why; raises nothing."""
    try:
        import sys

        text = " ".join(str(error).split())
        print(
            f"lm_profiler: the loop is not profiled: {type(error).__name__}: {text}",
            file=sys.stderr,
        )
    except Exception:  # stderr is closed
        pass
