"""Begins and ends the profile of a loop that is marked by torch's own hooks, and finds such a loop automatically."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from lm_profiler.callbacks.attachment import Attachment
from lm_profiler.callbacks.found_loop import facts_of_fabric, find_loop
from lm_profiler.callbacks.hooked_loop import HookedLoop
from lm_profiler.callbacks.instruments.profiling_options import ProfilingOptions
from lm_profiler.callbacks.instruments.worker_code import WORKER_CODE
from lm_profiler.callbacks.marks.torch_hooks import OPTIMIZER_HOOKS
from lm_profiler.measure.boundary import (
    Guard,
    comes_from_outside,
    error_text,
    print_message,
)
from lm_profiler.record.run_record import RunRecord

_TRAINER_RUNS = "a Lightning Trainer runs the loop: use Trainer(callbacks=[*yours, *profiling_callbacks()])"


@dataclass(eq=False)
class HookedRun:
    """The profile of one loop, in the thread that runs it."""

    loop: HookedLoop
    attachment: Attachment

    @property
    def record(self) -> RunRecord | None:
        return self.attachment.finisher.record

    @property
    def folder(self) -> Path | None:
        return self.attachment.finisher.files.folder

    @property
    def is_over(self) -> bool:
        return self.attachment.finisher.is_over

    def end(self, error: BaseException | None = None, ends_step: bool = True) -> None:
        """Record the loop, which has ended, or which ``error`` has ended; do nothing if it is recorded already.

        ``ends_step`` is whether its last step ends here. If the whole program ends, it is unknown what the program did
        after that step.
        """
        attachment = self.attachment
        finisher = attachment.finisher
        if finisher.is_forked_copy:
            return
        if not finisher.is_over and error is not None:
            finisher.guard.run(attachment.died, error)
        elif not finisher.is_over:
            if ends_step and attachment.phases is not None:
                attachment.guard.run(attachment.phases.close_step)
            finisher.guard.run(finisher.finished_early)
        # In a new guard, because those above may be disabled.
        Guard("leaving the loop", attachment.report).run(attachment.restore_loop)


def begin(loop: HookedLoop, options: ProfilingOptions) -> HookedRun:
    """Profile ``loop``, which runs or is about to run in this thread."""

    def restore() -> None:
        if loop.marks is not None:
            loop.marks.restore()
        WORKER_CODE.restore()

    attachment = Attachment(loop, options, restore)
    loop.count_batch = attachment.count_batch
    attachment.guard.run(attachment.prepare, options.clock())
    attachment.guard.run(attachment.start)
    return HookedRun(loop, attachment)


@dataclass(eq=False)
class LoopSearch:
    """Waits for the first optimizer that steps, finds the loop that steps it, and profiles that loop.

    The step that runs then does not count, because its start was not seen.
    """

    options: ProfilingOptions
    tokens_in: Callable[[Any], int] | None = None  # counts the tokens of a batch
    fabric: Any = None  # the Fabric of the loop, if it is known
    # called when a loop is found; returns whether to profile it
    admits: Callable[[], bool] = lambda: True
    run: HookedRun | None = field(default=None, init=False)
    # whether it was reported why there is no run
    has_reported: bool = field(default=False, init=False)
    _process: int = field(default_factory=os.getpid, init=False)

    def start(self) -> None:
        """Wait for the first step of an optimizer, unless another loop of this process is profiled."""
        if OPTIMIZER_HOOKS.is_taken:
            self._report(
                "another loop of this process is already being profiled, so this one is not"
            )
            return
        OPTIMIZER_HOOKS.attach(self._wait)
        # workers may start before the loop is found
        Guard("lines of workers", print_message).run(WORKER_CODE.install)

    def stop(self) -> None:
        """Stop waiting, and remove the hook that waits."""
        if self.run is None and OPTIMIZER_HOOKS.step_begins == self._wait:
            OPTIMIZER_HOOKS.detach()
            WORKER_CODE.restore()

    def _wait(self, optimizer: Any) -> None:
        is_forked_copy = os.getpid() != self._process
        if not is_forked_copy:
            self.find(optimizer)

    def find(self, optimizer: Any) -> None:
        """Find the loop that steps ``optimizer``, and profile it if it is admitted; our own errors are reported."""
        OPTIMIZER_HOOKS.detach()
        try:
            self._begin(optimizer)
        except BaseException as error:
            if comes_from_outside(error):
                raise
            self._report(f"the loop is not profiled: {error_text(error)}")

    def _begin(self, optimizer: Any) -> None:
        """Begin the run of the loop that steps ``optimizer``, unless a Trainer runs it or it is not admitted."""
        found = find_loop(optimizer)
        if found.is_of_trainer:
            if not self.options.launch.added:
                self._report(_TRAINER_RUNS)
            return
        if not self.admits():
            return
        framework = found.framework
        if self.fabric is not None:
            framework = facts_of_fabric(self.fabric)
        loop = HookedLoop(
            found.modules, [optimizer], framework, found.loader, self.tokens_in
        )
        self.run = begin(loop, self.options)

    def _report(self, text: str) -> None:
        self.has_reported = True
        print_message(text)


def end_with_program(search: LoopSearch) -> None:
    """Record the run of ``search`` when the program ends, also by an exception."""
    programs_hook = sys.excepthook

    def record_failure(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if search.run is not None:
            search.run.end(error, ends_step=False)
        programs_hook(kind, error, traceback)

    def record_end() -> None:
        if search.run is not None:
            search.run.end(ends_step=False)

    sys.excepthook = record_failure
    atexit.register(record_end)
