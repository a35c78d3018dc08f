"""How a run was started, and with which options."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lm_profiler.callbacks.instruments.actions import ActionsOptions
from lm_profiler.callbacks.instruments.memory import MemoryOptions
from lm_profiler.callbacks.instruments.numerics import NumericsOptions
from lm_profiler.callbacks.instruments.tracer import TraceOptions
from lm_profiler.callbacks.stages import StageOptions
from lm_profiler.callbacks.trackers import ExportOptions
from lm_profiler.callbacks.watch_options import WatchOptions
from lm_profiler.record.run import PlannedMemory, Verb


@dataclass(frozen=True)
class Launch:
    """How the run was started, so that a reader can start it again."""

    name: str = "lm_profiler"
    command: str = ""
    overrides: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    config_yaml: str | None = None
    folder: Path | None = None  # folder that was claimed for the run already
    # whether the command line turns signals into exceptions, and ends the ranks that this process started
    kept: bool = False
    # whether Lightning added the callback to a program that does not know it: its stdout is left to the program
    added: bool = False
    planned: PlannedMemory | None = None  # memory that the run would need, as it was rehearsed
    started: float = field(default_factory=time.time)  # seconds since 1970

    def facts(self) -> dict[str, Any]:
        """Return the record's fields about the start; the duration is up to now."""
        return {
            "name": self.name,
            "started": datetime.fromtimestamp(self.started, timezone.utc).isoformat(timespec="seconds"),
            "duration_s": max(time.time() - self.started, 0.0),
            "command": self.command,
            "overrides": dict(self.overrides),
            "config": dict(self.config) if self.config is not None else None,
            "planned": self.planned,
        }


@dataclass(frozen=True)
class ProfilingOptions:
    """The options of a ``TrainingProfiler``, whose docstring says what each means."""

    stages: StageOptions
    actions: ActionsOptions
    memory: MemoryOptions
    trace: TraceOptions
    launch: Launch | None
    peak_flops_per_s: float | None
    clock: Callable[[], int]
    quiet: bool
    verbose: bool
    numerics: NumericsOptions
    verb: Verb
    log_dir: Path
    export: ExportOptions = ExportOptions()  # noqa: RUF009 - frozen
    watch: WatchOptions | None = None

    def steps(self, collectives: int = 0) -> dict[str, int]:
        """Return the steps of each stage, in their order; ``collectives`` is how many the stage of that name has."""
        return {
            "warmup": self.stages.warmup_steps,
            "measure": self.stages.planned_steps,
            **({"collectives": collectives} if collectives else {}),
            "actions": self.actions.steps + 1 if self.actions.steps else 0,  # the last is followed by its lines
            "memory": self.memory.steps,
            "trace": self.trace.steps + 1 if self.trace.steps else 0,  # the first is the profiler's own warm-up
        }
