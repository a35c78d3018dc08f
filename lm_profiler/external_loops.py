"""Waits for the training loop of a program which ``lm_profiler run`` has started, if no Lightning Trainer runs it.

If ``LM_PROFILER`` is set, ``lm_profiler_autoload`` calls ``begin_search`` at the end of ``import torch``, which an
exception would end. So the module imports ``os`` alone, and raises nothing. Until the first optimizer steps there is
one pair of torch's hooks, and nothing else.
"""

import os

# the environment variable that asks for the profiler: a JSON object, as ``callbacks.run_request`` reads it
VARIABLE = "LM_PROFILER"


def begin_search() -> None:
    """Have the loop of the first optimizer that steps profiled, if it is requested."""
    if os.environ.get(VARIABLE, "").strip() in ("", "0"):
        return
    try:
        # By name: an import statement would be a dependency of this module on the callbacks.
        from importlib import import_module

        hooks = import_module("lm_profiler.callbacks.marks.torch_hooks")
        hooks.OPTIMIZER_HOOKS.attach_provisionally(_profile_loop_of)
    except Exception as error:
        _report(error)


def external_fabric_callbacks() -> list[object]:
    """Do the same where Lightning Fabric asks for callbacks, of which it gets none: torch's autoload may be off."""
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
