"""The options of a profiled run, and how it was started. ``--help`` shows the docstrings of options."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from lm_profiler.analysis.steps.step_model import FEWEST_STEPS, FINEST_TARGET
from lm_profiler.record.calls import check_folder_name, require
from lm_profiler.record.run_record import PlannedMemory, Verb
from lm_profiler.usage_error import UsageError, expect, expect_one_of

# Where no number of steps is given, measuring goes on until it has these steps and seconds, but ends at the limits.
# Below FEWEST_STEPS nothing can be said about the course of the steps, however long they take.
TIMED_STEPS, TIMED_SECONDS = 40, 10.0
TIMED_MOST_STEPS, TIMED_MOST_SECONDS = 5000, 60.0


def expect_step_numbers(
    *,
    warmup_steps: int,
    measure_steps: int | None,
    trace_steps: int,
    memory_steps: int,
    action_steps: int,
) -> None:
    """Raise UsageError if the steps of a stage are not a whole number; ``measure_steps`` may be left out."""
    steps = {
        "warmup_steps": warmup_steps,
        "trace_steps": trace_steps,
        "memory_steps": memory_steps,
        "action_steps": action_steps,
    }
    if measure_steps is not None:
        steps["measure_steps"] = measure_steps
    for option, number in steps.items():
        expect(isinstance(number, int), option, "a whole number", number)


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """How long to warm up and to measure.

    Args:
        warmup_steps: Steps before the measured ones. They are recorded, but no figure includes them.
        measure_steps: Steps to measure; 0 to only watch the run. If not given, at least 40 steps and 10 s, but at most
            a minute (or 10 steps, if these take longer), and no more steps than the loop has for all stages. If the
            rest of training is watched, 40 steps.
        until_ci: Instead of measure_steps, measure until half the width of the 95 % interval of the step time's level
            is at most this share of it, such as 0.005. This is checked after 10 steps, and again whenever a quarter
            more steps have been measured.
        max_steps: Maximum number of steps to measure with until_ci.
        max_seconds: Maximum seconds to measure with until_ci.
        stop_when_done: End the run when the stages are done. Otherwise training continues without the instruments.
    """

    warmup_steps: int = 5
    measure_steps: int | None = None
    until_ci: float | None = None
    max_steps: int = 1000
    max_seconds: float = 600.0
    stop_when_done: bool = True

    def __post_init__(self) -> None:
        expect(
            self.warmup_steps >= 0,
            "stages.warmup_steps",
            "0 or more",
            self.warmup_steps,
        )
        if self.measure_steps is not None:
            expect(
                self.measure_steps >= 0,
                "stages.measure_steps",
                "0 or more",
                self.measure_steps,
            )
        if self.until_ci is not None:
            share = f"a share of at least {FINEST_TARGET} (the best that one process can reach) and below 1"
            expect(
                FINEST_TARGET <= self.until_ci < 1,
                "stages.until_ci",
                share,
                self.until_ci,
            )
        expect(
            self.max_steps >= FEWEST_STEPS,
            "stages.max_steps",
            f"{FEWEST_STEPS} or more",
            self.max_steps,
        )
        expect(
            self.max_seconds > 0,
            "stages.max_seconds",
            "a positive number",
            self.max_seconds,
        )

    @property
    def is_timed(self) -> bool:
        """Whether the time decides how many steps are measured: neither a number nor a precision is given."""
        return self.measure_steps is None and self.until_ci is None

    def for_watched_run(self) -> StageOptions:
        """Return the options for a run that is watched to its end, which needs no longer measurement."""
        measure_steps = TIMED_STEPS if self.is_timed else self.measure_steps
        return replace(self, measure_steps=measure_steps, stop_when_done=False)

    @property
    def planned_steps(self) -> int:
        """The largest number of steps to measure."""
        if self.until_ci is not None:
            return self.max_steps
        if self.measure_steps is not None:
            return self.measure_steps
        return TIMED_MOST_STEPS


@dataclass(frozen=True, kw_only=True)
class ActionsOptions:
    """Measure which code uses the time outside all phases.

    Args:
        steps: Steps after the measured ones in which every action of the loop is timed by name; no other figure
            includes them. If slow steps recur, such as every fifth one, enough steps are timed to include a slow one,
            unless several ranks train. With 0, it is unknown which code uses that time. In one more step, the program's
            Python code is traced line by line.
    """

    steps: int = 3

    def __post_init__(self) -> None:
        expect(self.steps >= 0, "actions.steps", "0 or more", self.steps)


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Measure peak memory by phase and by cause.

    Args:
        steps: Steps after the measured ones in which memory is read wherever a phase begins or ends, and FLOPs are
            counted; they are not timed. With 0, FLOPs are counted from shapes alone after the run, which takes a few
            seconds; if trace.steps is 0 too, FLOPs are not counted.
        history: Record the allocator's history in those steps (CUDA), as memory_snapshot.pickle for memory_viz.
    """

    steps: int = 1
    history: bool = False

    def __post_init__(self) -> None:
        expect(self.steps >= 0, "memory.steps", "0 or more", self.steps)
        expect(
            self.steps > 0 or not self.history,
            "memory.steps",
            "1 or more with memory.history",
            self.steps,
        )
        expect(
            not self.history or torch.cuda.is_available(),
            "memory.history",
            "a CUDA device",
            None,
        )


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Record a trace with the PyTorch profiler.

    Args:
        steps: Steps to trace, after all timed steps; 0 for no trace. One more step runs before them, to warm up
            torch.profiler.
        record_shapes: Record the input shapes of operators, from which the waterfall computes bytes and FLOPs.
        with_stack: Record Python stacks, which makes the trace large.
        profile_memory: Record allocations of memory, which makes the trace large.
        nvtx: Mark the phases of every step as NVTX ranges, for Nsight Systems; for the built-in model with
            attention=math, also the computation of scores, softmax and values.
        cuda_profiler_range: Call cudaProfilerStart before the first measured step and cudaProfilerStop after the last,
            so that nsys profile --capture-range=cudaProfilerApi records only these steps.
    """

    steps: int = 2
    record_shapes: bool = True
    with_stack: bool = False
    profile_memory: bool = False
    nvtx: bool = False
    cuda_profiler_range: bool = False

    def __post_init__(self) -> None:
        expect(self.steps >= 0, "trace.steps", "0 or more", self.steps)
        for name in ("nvtx", "cuda_profiler_range"):
            is_possible = not getattr(self, name) or torch.cuda.is_available()
            expect(is_possible, f"trace.{name}", "a CUDA device", None)


@dataclass(frozen=True, kw_only=True)
class NumericsOptions:
    """Compare the numerical results of the precision with float32.

    Args:
        audit: After the run, pass its first batch through copies of the model, in its precision and in float32. Record
            the dtypes of parameters, outputs and gradients, and how far loss, logits and gradients differ. This takes
            the time of two steps, and memory for a second model and its gradients.
        losses: Also record loss and gradient norm of this many steps at the beginning. This adds a callback, so do not
            use it if the step times matter.
    """

    audit: bool = False
    losses: int = 0

    def __post_init__(self) -> None:
        expect(self.losses >= 0, "numerics.losses", "0 or more", self.losses)


TrackedFigures = bool | Literal["all"]


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Send the results to other places than the run's own folder.

    Args:
        trackers: When the stages are over, log the figures of the usual table (with `all`: every figure of run.json) to
            each logger of the Trainer, as lm_profiler/<name> in SI units, and facts of the run as hyperparameters. Any
            logger works: TensorBoard, CSV, W&B, MLflow, Comet. Loggers that accept files also get the page and the
            trace. A watched run then logs tokens/s, MFU, step time, data share and memory every log_every_n_steps or
            ten seconds, and the mean times of every thousand steps.
        prometheus: While a run is watched, serve its metrics at [HOST:]PORT, on 127.0.0.1 if no host is named; each
            process of a node takes the next port.
        textfile: While a run is watched, write its metrics to this file, for node_exporter's textfile collector.
    """

    trackers: TrackedFigures = False
    prometheus: int | str | None = None
    textfile: Path | None = None

    @property
    def monitoring(self) -> bool:
        """Whether a watched run publishes metrics."""
        return self.prometheus is not None or self.textfile is not None

    def address(self) -> tuple[str, int]:
        """Return the host and the port of ``prometheus``; raises UsageError if it is no address."""
        host, _, port = str(self.prometheus).rpartition(":")
        is_port = port.isascii() and port.isdigit() and 0 < int(port) < 2**16
        expect(
            is_port, "export.prometheus", "[HOST:]PORT, such as 9464", self.prometheus
        )
        return host or "127.0.0.1", int(port)

    def check(self, is_watched: bool) -> None:
        """Raise UsageError if there is nothing to publish or no place for it; MissingExtra without the library."""
        if not self.monitoring:
            return
        if not is_watched:
            raise UsageError(
                "export: prometheus and textfile need a watched run; add --watch=true"
            )
        require(
            "prometheus_client",
            "export.prometheus" if self.textfile is None else "export.textfile",
        )
        if self.textfile is not None:
            path = Path(self.textfile)
            is_writable = (
                os.access(path.absolute().parent, os.W_OK) and not path.is_dir()
            )
            expect(
                is_writable,
                "export.textfile",
                "a file in a folder that can be written to",
                self.textfile,
            )
        if self.prometheus is not None:
            _check_that_address_is_free(*self.address())


def _check_that_address_is_free(host: str, port: int) -> None:
    """Raise UsageError if no server can listen on ``host`` and ``port``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        # as the server itself does
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host.strip("[]"), port))
        except OSError as error:
            address = f"{host}:{port} ({error.strerror or error})"
            raise UsageError(
                f"export.prometheus: cannot listen on {address}; give a free address"
            ) from None


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Keep measuring until training ends, and report when and why it gets slower.

    Args:
        traces: Trace steps of a watched run: on request, after a change in the level of step times, and when slow steps
            of the same cause recur.
    """

    traces: bool = True


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
    is_supervised: bool = False
    # whether Lightning added the callback to a program that does not know it: its stdout is left to the program
    added: bool = False
    # memory that the run would need, as it was rehearsed
    planned: PlannedMemory | None = None
    started: float = field(default_factory=time.time)  # seconds since 1970
    # how much longer the first call of the user's attention took than the second, when it was checked
    autotuning_check_s: float | None = None
    # when the Trainer was called, by perf_counter_ns; no hook comes before prepare_data
    called_ns: int | None = None

    def facts(self) -> dict[str, Any]:
        """Return the record's fields about the start; the duration is up to now."""
        started = datetime.fromtimestamp(self.started, timezone.utc)
        return {
            "name": self.name,
            "command": self.command,
            "overrides": self.overrides,
            "config": self.config,
            "planned": self.planned,
            "autotuning_check_s": self.autotuning_check_s,
            "started": started.isoformat(timespec="seconds"),
            "duration_s": max(time.time() - self.started, 0.0),
        }


@dataclass(frozen=True)
class ProfilingOptions:
    """The options of a ``TrainingProfiler``; its docstring explains each of them."""

    stages: StageOptions
    actions: ActionsOptions
    memory: MemoryOptions
    trace: TraceOptions
    launch: Launch
    peak_flops_per_s: float | None
    clock: Callable[[], int]
    quiet: bool
    verbose: bool
    numerics: NumericsOptions
    verb: Verb
    log_dir: Path
    export: ExportOptions = ExportOptions()
    watch: WatchOptions | None = None

    def check(self) -> None:
        """Raise UsageError if the options do not go together, or nothing is to be measured or watched."""
        is_watched = self.watch is not None
        expect_one_of(get_args(Verb), "verb", self.verb)
        if self.watch is not None:
            expect(
                isinstance(self.watch, WatchOptions),
                "watch",
                "True, False or WatchOptions",
                self.watch,
            )
            expect(self.verb == "fit", "watch", "a fit", self.verb)
        can_be_watched = is_watched and self.stages.warmup_steps > 0
        has_work = self.stages.planned_steps > 0 or can_be_watched
        expect(
            has_work,
            "stages.measure_steps",
            "1 or more, or 0 with --watch=true and a warm-up step",
            0,
        )
        self.export.check(is_watched)
        check_folder_name(self.launch.name, self.log_dir)

    def steps(self, collectives: int = 0) -> dict[str, int]:
        """Return the steps of each stage, in their order; ``collectives`` is how many the stage of that name has."""
        steps = {
            "warmup": self.stages.warmup_steps,
            "measure": self.stages.planned_steps,
        }
        if collectives > 0:
            steps["collectives"] = collectives
        steps["actions"] = 0
        if self.actions.steps > 0:
            # the last step is followed line by line
            steps["actions"] = self.actions.steps + 1
        steps["memory"] = self.memory.steps
        steps["trace"] = 0
        if self.trace.steps > 0:
            # the first step is the profiler's warm-up
            steps["trace"] = self.trace.steps + 1
        return steps
