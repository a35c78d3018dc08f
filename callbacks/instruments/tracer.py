"""The torch.profiler trace of whole steps, with the phases in it, in a stage of its own after all timing."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from lm_profiler.analysis.trace.kernel_sums import kernel_table
from lm_profiler.analysis.trace.pieces import TracedWork, traced_work
from lm_profiler.analysis.trace.walk import Packed, trace_events
from lm_profiler.callbacks.instruments.module_ranges import ModuleRanges
from lm_profiler.measure.boundary import UNGUARDED, Guard
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.record.kernels import KernelTable, kernels_file
from lm_profiler.record.quantities import PARTS, PHASES
from lm_profiler.torch_names import PREPARE_TRACE, PROFILER_ENABLED
from lm_profiler.usage_error import UsageError, expect

# devices whose kernels torch.profiler records, besides the host's operators
TRACED = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """The PyTorch profiler's trace.

    Args:
        steps: Steps to trace, after all that is timed; one more runs before them, in which the profiler warms up.
            0 for no trace.
        record_shapes: Keep the operators' input shapes, from which the waterfall has bytes and FLOPs.
        with_stack: Keep the Python stacks (large).
        profile_memory: Keep allocations (large).
        nvtx: Mark the phases of every step as NVTX ranges, for Nsight Systems; of our own model with attention=math
            its scores, softmax and values too.
        cuda_profiler_range: Call cudaProfilerStart before the first measured step and cudaProfilerStop after the last,
            so that nsys profile --capture-range=cudaProfilerApi records these steps alone.
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
            if getattr(self, name) and not torch.cuda.is_available():
                raise UsageError(f"trace.{name}: expected a CUDA device, given none; leave the option out")


class _Ranges:
    """Observer of marks that names each phase in the trace."""

    def __init__(self) -> None:
        self._open = ExitStack()

    def __call__(self, code: int) -> None:
        self._open.close()
        if code < len(PHASES):
            self._open.enter_context(record_function(f"phase: {PARTS[code]}"))


class NvtxRanges:
    """Observer of marks that puts each phase into an NVTX range. It runs in timed steps too: no context managers."""

    def __init__(self) -> None:
        self._open = False

    def __call__(self, code: int) -> None:
        if self._open:
            torch.cuda.nvtx.range_pop()
        self._open = code < len(PHASES)
        if self._open:
            torch.cuda.nvtx.range_push(PARTS[code])


@dataclass(eq=False)
class Tracer:
    """Runs torch.profiler over whole steps and keeps the trace as ``trace/rank<n>.pt.trace.json.gz``.

    That name is what TensorBoard's PyTorch plugin looks for, and Perfetto opens it as it is.
    """

    options: TraceOptions  # how much is traced
    device: torch.device  # the device whose kernels are traced
    timeline: Timeline  # its marks name the phases
    folder: Path  # the run's
    rank: int  # this process's
    module: Callable[[], nn.Module]  # returns the module whose parts are named in the trace; called once it is built
    taken: bool = False  # whether the user has a profiler of torch's own, which may begin at any time
    label: str = ""  # what the file's name has after the rank, as ``.step500`` of a trace amid training
    part: Guard = UNGUARDED
    _profile: profile | None = None
    _undo: ExitStack = field(default_factory=ExitStack)
    name: str = "trace"
    facts: ClassVar[Mapping[str, Any]] = {}  # they are in the trace's own files

    @property
    def path(self) -> Path:
        return self.folder / "trace" / f"rank{self.rank}{self.label}.pt.trace.json.gz"

    def begin(self, stage: str) -> None:
        if stage != "trace":
            return
        if self.taken or PROFILER_ENABLED.find():
            # torch has one session a process: a second one would end the user's, or the process.
            self.part.leave_out("torch.profiler already runs in this process, which can have one session only")
            return
        activities = [ProfilerActivity.CPU]
        if self.device.type in TRACED:
            activities.append(TRACED[self.device.type])
        # One warm-up step: the profiler's first one is slow, and is thrown away.
        tracing = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=self.options.steps, repeat=1),
            record_shapes=self.options.record_shapes,
            with_stack=self.options.with_stack,
            profile_memory=self.options.profile_memory,
            acc_events=True,  # else torch before 2.13 warns of a second cycle, which there is not
        )
        tracing.start()
        if tracing.profiler is not None:
            tracing.profiler.acc_events = False  # torch would parse all events for it, and nobody reads them
        self._undo.callback(tracing.stop)
        self._profile = tracing
        ranges, modules = self.part.guard(_Ranges()), ModuleRanges(self.part)
        self._undo.callback(self.timeline.unobserve, ranges)
        self.timeline.observers += (ranges,)
        self._undo.callback(modules.detach)
        modules.attach(self.module())
        self._give_way_to_others()

    def _give_way_to_others(self) -> None:
        """Stop before another session is prepared, such as a callback of the user's: two end the process."""
        prepare = PREPARE_TRACE.of(autograd_profiler.profile)

        def prepared(another: autograd_profiler.profile) -> None:
            self.part.run(self._give_way)
            prepare(another)

        setattr(autograd_profiler.profile, PREPARE_TRACE.name, prepared)
        self._undo.callback(setattr, autograd_profiler.profile, PREPARE_TRACE.name, prepare)

    def _give_way(self) -> None:
        self.discard()
        self.part.leave_out("another session of torch.profiler began, and a process can have one only")

    def step(self) -> None:
        """Tell the profiler that a step of the stage has ended and another follows."""
        if self._profile is None:
            return
        if self._profile.step_num == 0 and self.device.type in TRACED:
            # What the profiler's own step left in the queue would run in the first traced one.
            torch.accelerator.synchronize(self.device)
        self._profile.step()

    def end(self, stage: str) -> None:
        running = self._profile
        self.discard()
        if running is None:
            return
        self.path.parent.mkdir(exist_ok=True)
        # In a temporary folder, which is removed with all that is in it: torch writes a second file beside the one that
        # it is given, and leaves it there when the disk is full.
        with TemporaryDirectory(dir=self.path.parent, prefix=".writing-", ignore_cleanup_errors=True) as own:
            plain, aside = Path(own, "trace.json"), Path(own, self.path.name)
            running.export_chrome_trace(str(plain))
            # Compressed here: torch itself would take six times as long, for a file that is a tenth smaller.
            with plain.open("rb") as source, gzip.open(aside, "wb", compresslevel=6) as target:
                shutil.copyfileobj(source, target)
            aside.replace(self.path)

    def work(self, notes: list[str]) -> TracedWork | None:
        """Return what ran in the traced steps; None without a trace, or with a note where the trace has no whole step.

        Raises:
            ValueError: the trace is not whole.
            OSError: it cannot be read.
        """
        if not self.path.exists():
            return None
        packed = Packed(trace_events(self.path))
        if packed.steps and packed.phases:
            return traced_work(packed)
        notes.append("no kernels, no waterfall: the run ended before a traced step was over")
        return None

    def kernels(self, work: TracedWork | None) -> KernelTable | None:
        """Return the table of kernels in the traced steps, and write it beside the trace; None without a trace.

        Raises:
            OSError: the table cannot be written.
        """
        if work is None:
            return None
        table = kernel_table(work)
        table.write(kernels_file(self.path))
        return table

    def discard(self) -> None:
        """Stop, and keep nothing."""
        self._profile = None
        self._undo.close()
