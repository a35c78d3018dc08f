"""Profiles the loop of a program that has not requested it, from its first optimizer step on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lm_profiler.callbacks.hooked_run import LoopSearch, end_with_program
from lm_profiler.callbacks.instruments.profiling_options import Launch
from lm_profiler.callbacks.marks.torch_hooks import OPTIMIZER_HOOKS
from lm_profiler.callbacks.own_loop import loop_options
from lm_profiler.callbacks.run_request import (
    RunRequest,
    claim,
    parse_request,
    release_claim,
)

# the owner for which all ranks of such a loop claim the run; for a Trainer it is the Trainer's number
_OWNER = "loop"

# the search that found a loop in this process
_search: LoopSearch | None = None


def profile_loop_of(optimizer: Any, text: str) -> None:
    """Profile the loop that steps ``optimizer``, if the request ``text`` is for such a loop.

    Raises:
        UsageError: an option is wrong.
    """
    OPTIMIZER_HOOKS.detach()  # the first step decides
    request = parse_request(text)
    options = dict(request.options)
    verb = options.pop("verb", "fit")
    is_for_a_trainer = verb != "fit" or request.trainer is not None
    if is_for_a_trainer:
        return
    global _search
    launch = Launch(
        name=options.pop("name", "lm_profiler"), command=request.command, added=True
    )
    search = LoopSearch(
        loop_options(**options, launch=launch), admits=lambda: _claims_run(request)
    )
    search.find(optimizer)
    if search.run is not None:
        _search = search
        end_with_program(search)


def leave_loop_to_trainer(claims: Path | None, is_watched: bool) -> None:
    """End the run of a loop of this process, and take back its claim, because the fit of a Trainer begins.

    A program may take some steps of its own before the fit, for example to try its model. If all stages have run, the
    loop keeps its claim, unless the fit is to be watched: such a loop cannot be watched.
    """
    run = None if _search is None else _search.run
    if run is None or (run.is_over and not is_watched):
        return
    run.end()
    if claims is not None:
        release_claim(claims, _OWNER)


def _claims_run(request: RunRequest) -> bool:
    """Return whether no Trainer of the program has claimed the run."""
    if request.claims is None:
        return True
    try:
        return claim(request.claims, _OWNER)
    except OSError:
        # This is another node, whose processes do not share the folder: each decides for itself.
        return True
