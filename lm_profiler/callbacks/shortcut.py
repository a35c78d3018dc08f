"""Makes the callback: for the user's own Trainer, and for a program that does not contain it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from lightning.pytorch import Callback, Trainer

from lm_profiler.callbacks.admitted_loop import leave_loop_to_trainer
from lm_profiler.callbacks.instruments.profiling_options import (
    ActionsOptions,
    ExportOptions,
    Launch,
    MemoryOptions,
    StageOptions,
    TraceOptions,
    TrackedFigures,
    WatchOptions,
    expect_step_numbers,
)
from lm_profiler.callbacks.marks.namespaces import verb_of
from lm_profiler.callbacks.marks.torch_hooks import OPTIMIZER_HOOKS
from lm_profiler.callbacks.profiling import TrainingProfiler
from lm_profiler.callbacks.run_request import claim, parse_request, release_claim
from lm_profiler.measure.boundary import print_message
from lm_profiler.record.run_record import Verb

_numbers = count(1)  # the numbers of the Trainers of this process

# the number of the Trainer that was admitted in this process, if the program's processes share no folder
_admitted_number: int | None = None

# whether it was reported that further runs of the program are not profiled
_refusal_is_reported = False


def profiling_callbacks(
    warmup_steps: int = 5,
    measure_steps: int | None = None,
    trace_steps: int = 2,
    memory_steps: int = 1,
    stop_when_done: bool | None = None,
    name: str = "lm_profiler",
    verb: Verb = "fit",
    log_dir: str | Path = "logs",
    action_steps: int = 3,
    verbose: bool = False,
    export_trackers: TrackedFigures = False,
    watch: bool | WatchOptions = False,
) -> list[Callback]:
    """Return the callback that profiles your own ``Trainer``: ``Trainer(callbacks=[*yours, *profiling_callbacks()])``.

    Args:
        warmup_steps: steps before the measured ones.
        measure_steps: steps to measure. If not given, at least 40 steps and 10 s, but at most a minute (10 steps if
            they take longer) and no more steps than the loop has for all stages.
        trace_steps: steps to trace with torch.profiler afterwards; 0 for none.
        memory_steps: steps in which memory is measured by phase, and FLOPs are counted. With 0 FLOPs are counted from
            shapes alone when the run is over, which takes some seconds; if ``trace_steps`` is 0 too, they are not.
        stop_when_done: end the run after the stages; otherwise it continues without the instruments. If not given, a
            fit ends and an evaluation continues: if it were cut short, its results would cover only the first batches.
        name: name of the run.
        verb: what to profile: ``fit``, ``validate``, ``test`` or ``predict``. Other verbs are not profiled.
        log_dir: folder of all runs; this one's is ``<name>/version_<n>`` below it.
        action_steps: steps in which each action of the loop is timed by its name; 0 for none.
        verbose: print all figures at the end, not only the most important ones.
        export_trackers: log the figures of the usual table to the Trainer's own loggers, as ``lm_profiler/<name>``,
            after the stages; ``"all"`` logs all figures.
        watch: keep measuring after the stages until training ends, and report when and why it gets slower.

    Raises:
        ValueError: a number of steps is negative, or nothing is to be measured.
    """
    expect_step_numbers(
        warmup_steps=warmup_steps,
        measure_steps=measure_steps,
        trace_steps=trace_steps,
        memory_steps=memory_steps,
        action_steps=action_steps,
    )
    if stop_when_done is None:
        stop_when_done = verb == "fit"
    profiler = TrainingProfiler(
        StageOptions(
            warmup_steps=warmup_steps,
            measure_steps=measure_steps,
            stop_when_done=stop_when_done,
        ),
        MemoryOptions(steps=memory_steps),
        TraceOptions(steps=trace_steps),
        Launch(name=name),
        verb=verb,
        verbose=verbose,
        log_dir=log_dir,
        actions=ActionsOptions(steps=action_steps),
        export=ExportOptions(trackers=export_trackers),
        watch=watch,
    )
    return [profiler]


def admitted_callbacks(request: str) -> list[Callback]:
    """Return the callback that Lightning adds to the next Trainer of this process.

    ``request`` is a text that ``parse_request`` reads.
    """
    run_request = parse_request(request)
    number = next(_numbers)
    options = {"stop_when_done": False, **run_request.options}
    profilers = profiling_callbacks(**options)
    for profiler in profilers:
        assert isinstance(profiler, TrainingProfiler)
        profiler.launched(command=run_request.command, added=True)
        profiler.admits = Admission(
            number,
            wanted_number=run_request.trainer,
            verb=options.get("verb", "fit"),
            claims=run_request.claims,
            is_watched=bool(options.get("watch")),
        )
    return profilers


@dataclass(eq=False)
class Admission:
    """Decides whether a Trainer that is about to run is profiled: only one Trainer of a program is, and only once."""

    number: int  # the position of the Trainer among those of its process, from 1
    # the number of the Trainer to profile; None for the first that runs ``verb``
    wanted_number: int | None
    verb: Verb  # the verb that is profiled
    # A folder that the processes of this node share; None if the program was started by hand. With it the ranks agree
    # on the first Trainer, because a spawned rank has seen only its own Trainer.
    claims: Path | None
    is_watched: bool = False  # whether the fit is watched until its end
    _is_used: bool = False  # whether the Trainer was admitted

    def __call__(self, trainer: Trainer) -> bool:
        """Return whether the callback profiles the run of ``trainer``: it must be the first run that is wanted."""
        if OPTIMIZER_HOOKS.is_provisional and verb_of(trainer) == "fit":
            # The search for a loop without a Trainer would take this loop for one.
            OPTIMIZER_HOOKS.detach()
        is_wanted_number = (
            self.wanted_number is None or self.wanted_number == self.number
        )
        if trainer.barebones or verb_of(trainer) != self.verb or not is_wanted_number:
            return False
        if self.verb == "fit":
            leave_loop_to_trainer(self.claims, self.is_watched)
        profilers = [
            callback
            for callback in trainer.callbacks  # type: ignore[attr-defined]
            if isinstance(callback, TrainingProfiler)
        ]
        program_has_own = any(profiler.admits is None for profiler in profilers)
        if self._is_used or not self._claim():
            if trainer.is_global_zero and not program_has_own:
                self._report_refusal()
            return False
        self._is_used = True
        # The program's own profiler has priority.
        return not program_has_own

    def _report_refusal(self) -> None:
        """Print, once per process, that further runs of the verb are not profiled."""
        global _refusal_is_reported
        if _refusal_is_reported:
            return
        _refusal_is_reported = True
        hint = f"`lm_profiler run --trainer={self.number}` profiles this one"
        print_message(f"only the first {self.verb} of a program is profiled; {hint}")

    def release(self) -> None:
        """Take the admission back, because a Tuner has searched and the fit after that is to be profiled.

        The admission is noted in this process or in the folder of claims; it is removed from both.
        """
        global _admitted_number
        self._is_used = False
        if _admitted_number == self.number:
            _admitted_number = None
        if self.claims is not None:
            release_claim(self.claims, str(self.number))

    def _claim(self) -> bool:
        """Return whether no other Trainer of the program has been admitted."""
        global _admitted_number
        with suppress(OSError):
            if self.claims is not None and self.claims.is_dir():
                return claim(self.claims, str(self.number))
        # On another node, or in a program that was started by hand, each process decides for itself.
        if _admitted_number is None:
            _admitted_number = self.number
        return _admitted_number == self.number
