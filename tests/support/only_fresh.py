"""A question that only a fresh process answers."""

from lm_profiler.processes.child import Unfit

FRESH = True
"""Set it to False: copies of this process know."""


def find() -> str:
    if not FRESH:
        raise Unfit
    return "found"
