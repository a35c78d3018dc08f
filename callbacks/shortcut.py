"""One function that makes the callback for your own Trainer."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from lm_profiler.callbacks.admission import Admission
from lm_profiler.callbacks.instruments.actions import ActionsOptions
from lm_profiler.callbacks.instruments.memory import MemoryOptions
from lm_profiler.callbacks.instruments.tracer import TraceOptions
from lm_profiler.callbacks.launch import Launch
from lm_profiler.callbacks.profiling import TrainingProfiler
from lm_profiler.callbacks.stages import StageOptions
from lm_profiler.callbacks.trackers import ExportOptions
from lm_profiler.callbacks.watch_options import WatchOptions
from lm_profiler.record.run import Verb

_numbers = count(1)  # the numbers of the Trainers of this process


def profiling_callbacks(
    warmup_steps: int = 5,
    measure_steps: int = 40,
    trace_steps: int = 2,
    memory_steps: int = 1,
    stop_when_done: bool | None = None,
    name: str = "lm_profiler",
    verb: Verb = "fit",
    log_dir: str | Path = "logs",
    action_steps: int = 3,
    verbose: bool = False,
    export_trackers: bool = False,
    watch: bool | WatchOptions = False,
) -> list[Callback]:
    """Return the callback that profiles your own ``Trainer``: ``Trainer(callbacks=[*yours, *profiling_callbacks()])``.

    Args:
        warmup_steps: steps before the measured ones.
        measure_steps: steps to measure.
        trace_steps: steps to trace with torch.profiler afterwards; 0 for none.
        memory_steps: steps in which memory is read phase by phase, and FLOPs are counted; with 0 they are counted on
            shapes alone when the run is over, which takes some seconds; without ``trace_steps`` too, they are not.
        stop_when_done: end the run then; otherwise it goes on with the instruments taken out. If not given, a fit ends
            and an evaluation goes on: cut, its results would be those of the first batches.
        name: of the run.
        verb: what to profile: ``fit``, ``validate``, ``test`` or ``predict``; the Trainer's others are left alone.
        log_dir: folder of all runs; this one's is ``<name>/version_<n>`` below it.
        action_steps: steps in which each action of the loop is timed by its name; 0 for none.
        verbose: print all that is known at the end, not only what matters most.
        export_trackers: log the figures to the Trainer's own loggers, as ``lm_profiler/<name>``, after the stages.
        watch: keep the marks when the stages are done, until training ends, and tell when and why it gets slower.

    Raises:
        ValueError: a number of steps is negative, or nothing is to be measured.
    """
    stop = verb == "fit" if stop_when_done is None else stop_when_done
    return [
        TrainingProfiler(
            StageOptions(warmup_steps=warmup_steps, measure_steps=measure_steps, stop_when_done=stop),
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
    ]


def admitted_callbacks(asked: str) -> list[Callback]:
    """Return the callback for the next Trainer of this process.

    Args:
        asked: A JSON object: ``options`` of ``profiling_callbacks``, and the ``command``, the number of the
            ``trainer`` and the folder of ``claims``, each of which may be missing; or ``1`` for none of them.

    Raises:
        ValueError: it is no such object.
    """
    given: dict[str, Any] = {} if asked.strip() == "1" else json.loads(asked)
    claims = given.get("claims")
    number = next(_numbers)
    options = {"stop_when_done": False, **given.get("options", {})}
    profilers = profiling_callbacks(**options)
    for profiler in profilers:
        assert isinstance(profiler, TrainingProfiler)
        profiler.launched(command=given.get("command", ""), added=True)
        folder = None if claims is None else Path(claims)
        profiler.admission = Admission(number, given.get("trainer"), options.get("verb", "fit"), folder)
    return profilers
