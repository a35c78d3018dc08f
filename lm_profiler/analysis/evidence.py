"""The evidence of a run, or of a window of a run, from which its record is concluded: plain data, stored in a file.

``callbacks.collect`` makes it, ``analysis.conclude`` makes a record of it. It stands here and not beside the record,
because the arithmetic defines the types of what it holds: timelines of ranks, delays, pieces of a trace.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import SkipValidation, TypeAdapter, ValidationError

from lm_profiler.analysis.hardware.roofline import Work
from lm_profiler.analysis.ranks.rank_timeline import RankTimeline
from lm_profiler.analysis.steps.summaries import BatchCount
from lm_profiler.analysis.trace.kernel_sums import kernel_table
from lm_profiler.analysis.trace.pieces import read_traced_work
from lm_profiler.analysis.why.operators import Lists
from lm_profiler.analysis.why.traced import Traced, broken_down
from lm_profiler.record.files import write_whole
from lm_profiler.record.kernels import KernelTable
from lm_profiler.record.parts import PARTS
from lm_profiler.record.run_record import (
    AllocatorReading,
    BetweenSteps,
    CodePart,
    Contention,
    Environment,
    ExpertLoad,
    Failure,
    Flops,
    LoaderFacts,
    LoopKind,
    MemoryCauses,
    MemoryLevels,
    ModelFacts,
    NeedlessOperators,
    NumericsFacts,
    OtherByOwner,
    OuterCall,
    OutsideSteps,
    PlannedMemory,
    PythonTime,
    RecordError,
    Settings,
    Status,
    StepCounters,
    Sync,
    Telemetry,
    ThreadUse,
    Verb,
)
from lm_profiler.record.steps import Peaks, read_rows

EVIDENCE_FILE = "evidence.json.gz"

_UNTYPED = Annotated[Any, SkipValidation]


@dataclass(frozen=True)
class Evidence:
    """Everything that a run left, for all ranks. Times in seconds, memory in bytes; None means unknown.

    A field that the record has by the same name goes there as it is; ``RunRecord`` documents its meaning.
    """

    name: str = "lm_profiler"
    command: str = ""
    started: str = ""
    duration_s: float = 0.0
    overrides: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    planned: PlannedMemory | None = None
    autotuning_check_s: float | None = None
    verb: Verb = "fit"
    loop: LoopKind = "Trainer"
    status: Status = "ok"
    failure: Failure | None = None
    steps_planned: Mapping[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()

    # What the steps left.
    rows: _UNTYPED = ()  # A ``StepTable``, or rows, of all ranks and stages. Their own files keep them.
    # the steps at which the number of batches changes, for each rank
    batch_counts: Sequence[Sequence[BatchCount]] = ()
    between_steps_s: float | None = None
    between: Sequence[BetweenSteps] = ()
    outside: Sequence[OutsideSteps] = ()
    stages_s: float | None = None
    # share of the measured phases at whose beginning the device had nothing left to do
    device_idle: float | None = None
    part_peaks: Mapping[str, Peaks] = field(default_factory=dict)
    causes: Mapping[str, MemoryCauses] = field(default_factory=dict)
    moments: Mapping[str, MemoryCauses] = field(default_factory=dict)
    levels: MemoryLevels | None = None
    allocator: AllocatorReading | None = None
    other_by_owner: OtherByOwner | None = None
    thread_use: Mapping[str, ThreadUse] = field(default_factory=dict)
    python_times: Sequence[PythonTime] = ()
    outer_calls: Sequence[OuterCall] = ()
    factorizing_operators: Sequence[str] = ()
    needless_operators: Sequence[NeedlessOperators] = ()
    code_parts: Sequence[CodePart] = ()
    recompilations: int = 0
    warmup_compile_s: float | None = None
    loader: LoaderFacts | None = None
    telemetry: Telemetry | None = None
    contention: Contention | None = None
    syncs: Sequence[Sync] | None = None
    # counters of each measured step, of each rank that has them
    counters: Sequence[StepCounters] = ()
    # the timeline of each rank that has noted when it came to its collectives
    timelines: Sequence[RankTimeline] = ()
    parts: Sequence[str] = PARTS  # what the codes in ``timelines`` stand for
    ranks_heard: int = 1  # the number of ranks that the facts cover; ``rows`` may cover more, whose files were found

    # What the Trainer, the module and the machine report.
    world_size: int = 1
    accumulate_grad_batches: int = 1
    precision: str = "32-true"  # the Trainer's precision, by Lightning's name
    # whether DDP wraps the module, so that gradients are reduced during backward
    reduces_in_backward: bool = False
    environment: Environment | None = None
    model: ModelFacts | None = None
    experts: Sequence[ExpertLoad] = ()
    # the settings that are switched on, as far as that can be read; ``conclude`` adds what the figures say
    settings: Settings | None = None
    lists: Lists | None = None  # the lists of tensors that the optimizers are given
    multiprocessors: int | None = None  # the number of multiprocessors of one device
    # the peak of one device, where the user says it
    peak_flops_per_s: float | None = None

    # What is determined after all timing.
    flops: Flops | None = None  # FLOPs of a step of ``work_batches``, over all ranks
    # FLOPs of a step of one rank, by the dtype of their factors in torch's names
    by_dtype: Mapping[str, int] = field(default_factory=dict)
    # the least work of each phase of a step, on one device
    work: Mapping[str, Work] = field(default_factory=dict)
    # batches of the step whose work this is, over all ranks
    work_batches: float | None = None
    # elements of the largest tensor of each of them, in sum; None means unknown
    work_elements: float | None = None
    # the machine's own FLOP/s for each dtype of the run's matmuls, by torch's names: of one device
    ceilings: Mapping[str, float | None] = field(default_factory=dict)
    # bytes/s that one device read and wrote in a large copy
    copied_bytes_per_s: float | None = None
    numerics: NumericsFacts | None = None
    # Where the time of rank 0's traced steps went, a ``KernelTable``. The trace's own file keeps it.
    kernels: _UNTYPED = None
    traced: _UNTYPED = None  # the same in pieces and gaps, a ``Traced``


_KEPT_ELSEWHERE = {"rows", "kernels", "traced"}
# takes 20 ms to make, and many runs may be read
_adapter = cache(partial(TypeAdapter[Evidence], Evidence))


def write_evidence(folder: Path, evidence: Evidence) -> None:
    """Write ``evidence`` into ``folder``, without the rows and the trace, which have their own files."""
    content = _adapter().dump_json(evidence, exclude=_KEPT_ELSEWHERE)
    write_whole(
        folder / EVIDENCE_FILE, gzip.compress(content, compresslevel=5, mtime=0)
    )


def read_evidence(folder: Path) -> Evidence:
    """Return the evidence of the run in ``folder``, with its rows and the contents of its trace.

    Raises:
        RecordError: there is none, or a file of it is damaged or foreign.
    """
    path = folder / EVIDENCE_FILE
    evidence = _read_file(path)
    if tuple(evidence.parts) != PARTS:
        raise RecordError(
            f"{path}: was written by a version of lm_profiler with other phases: {', '.join(evidence.parts)}"
        )
    kernels, traced = read_trace(folder / "trace" / "rank0.pt.trace.json.gz")
    return replace(evidence, rows=read_rows(folder), kernels=kernels, traced=traced)


def read_batch_counts(folder: Path) -> Sequence[Sequence[BatchCount]]:
    """Return the batches of each rank's steps; none if the run left no evidence that can be read."""
    try:
        return _read_file(folder / EVIDENCE_FILE).batch_counts
    except RecordError:
        return ()


def read_counters(folder: Path) -> Sequence[StepCounters]:
    """Return the counters of each measured step of all ranks; none if the run left no evidence that can be read."""
    try:
        return _read_file(folder / EVIDENCE_FILE).counters
    except RecordError:
        return ()


def _read_file(path: Path) -> Evidence:
    """Read the evidence in ``path``; raise RecordError if there is none."""
    try:
        with gzip.open(path) as file:
            content = file.read()
        return _adapter().validate_json(content)
    except FileNotFoundError:
        raise RecordError(
            f"{path}: does not exist: a version before 0.3 wrote the run, or it was killed"
        ) from None
    except (OSError, EOFError, zlib.error, ValidationError) as error:
        raise RecordError(
            f"{path}: is not the evidence of a run: {str(error).splitlines()[0]}"
        ) from None


def read_trace(path: Path) -> tuple[KernelTable | None, Traced | None]:
    """Return the contents of the trace in ``path``; nothing if there is no trace, or none with a whole step."""
    try:
        work = read_traced_work(path)
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: {error}") from None
    return (None, None) if work is None else (kernel_table(work), broken_down(work))
