"""The evidence of a run: plain data, stored in a file, from which its record is computed.

``callbacks.collect`` creates it, and ``analysis.conclude`` computes the record from it. It is in this package, and not
beside the record, because the types of its fields are defined by the analysis (timelines of ranks, pieces of a trace).
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
from lm_profiler.analysis.why.operators import TensorListFacts
from lm_profiler.analysis.why.traced import Traced, broken_down
from lm_profiler.record.files import write_whole
from lm_profiler.record.kernels import KernelTable
from lm_profiler.record.operator_calls import LineOperators
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
    LargeResult,
    LoaderFacts,
    LoopKind,
    MemoryCauses,
    MemoryLevels,
    ModelFacts,
    NeedlessOperators,
    NumericsFacts,
    OtherByOwner,
    OtherThreads,
    OuterCall,
    OutsideSteps,
    PlannedMemory,
    PythonTime,
    RecordError,
    RepeatedResult,
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
    """All data of a run, of all ranks. Times are in seconds, memory is in bytes; None means unknown.

    Fields that ``RunRecord`` has too, by the same name, are copied to the record; their meaning is documented there.
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
    is_watched: bool = False
    status: Status = "ok"
    failure: Failure | None = None
    steps_planned: Mapping[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()

    # Data of the steps.
    rows: _UNTYPED = ()  # a ``StepTable``, or rows, of all ranks and stages; stored in files of their own
    # for each rank, the sizes of its batches: an entry for the first step, and for each step at which they change
    batch_counts: Sequence[Sequence[BatchCount]] = ()
    between_steps_s: float | None = None
    between: Sequence[BetweenSteps] = ()
    outside: Sequence[OutsideSteps] = ()
    first_steps_of_epochs: Sequence[int] = ()  # without the first step of the run
    stages_s: float | None = None
    # share of the measured phases at whose beginning the device had already finished its work
    device_idle: float | None = None
    # the number of batches in the measured steps after which gradients are clipped, and of those after which this is
    # too early, because later batches still add to the gradients
    clipped_batches: int = 0
    early_clips: int = 0
    part_peaks: Mapping[str, Peaks] = field(default_factory=dict)
    causes: Mapping[str, MemoryCauses] = field(default_factory=dict)
    moments: Mapping[str, MemoryCauses] = field(default_factory=dict)
    levels: MemoryLevels | None = None
    allocator: AllocatorReading | None = None
    # main memory after the measured steps: what the process held, and what it could have had in addition; only on a CPU
    resident_bytes: int | None = None
    available_bytes: int | None = None
    other_by_owner: OtherByOwner | None = None
    thread_use: Mapping[str, ThreadUse] = field(default_factory=dict)
    other_threads: OtherThreads | None = None
    python_times: Sequence[PythonTime] = ()
    outer_calls: Sequence[OuterCall] = ()
    data_calls: Sequence[OuterCall] = ()
    slow_calls: Sequence[PythonTime] = ()
    large_results: Sequence[LargeResult] = ()
    repeated_results: Sequence[RepeatedResult] = ()
    # of a batch that a worker of the loader loads
    worker_times: Sequence[PythonTime] = ()
    # the operators that count as Python code in ``python_times``
    line_operators: Sequence[LineOperators] = ()
    factorizing_operators: Sequence[str] = ()
    needless_operators: Sequence[NeedlessOperators] = ()
    # the share of forward's operators, by their time, that belong to backward passes within it
    backward_share_of_forward: float = 0.0
    # the shares of the operators of forward and backward that torch.compile does not fuse
    uncompiled_shares: Mapping[str, float] = field(default_factory=dict)
    # whether forward applies a layer twice to the same values, by the data flow of a step; None if it is unknown
    repeats_forward: bool | None = None
    code_parts: Sequence[CodePart] = ()
    recompilations: int = 0
    warmup_compile_s: float | None = None
    loader: LoaderFacts | None = None
    telemetry: Telemetry | None = None
    contention: Contention | None = None
    syncs: Sequence[Sync] | None = None
    # the counters of each measured step, of all ranks that have them
    counters: Sequence[StepCounters] = ()
    # the timelines of the ranks that recorded their arrivals at collectives
    timelines: Sequence[RankTimeline] = ()
    parts: Sequence[str] = PARTS  # the parts that are the codes in ``timelines``
    ranks_heard: int = 1  # the number of ranks with facts here; ``rows`` may have more, whose files were found

    # Data of the Trainer, the module and the machine.
    world_size: int = 1
    accumulate_grad_batches: int = 1
    precision: str = "32-true"  # the Trainer's precision, by Lightning's name
    # whether DDP wraps the module, so that gradients are reduced during backward
    reduces_in_backward: bool = False
    environment: Environment | None = None
    model: ModelFacts | None = None
    experts: Sequence[ExpertLoad] = ()
    # the settings of the run, if they can be read; ``conclude`` adds those that follow from figures
    settings: Settings | None = None
    # facts about the lists of tensors that optimizers get, which a trace lacks
    lists: TensorListFacts | None = None
    multiprocessors: int | None = None  # the number of multiprocessors of one device
    # the peak of one device, if the user stated it
    peak_flops_per_s: float | None = None

    # Data that are measured after all steps were timed.
    flops: Flops | None = None  # FLOPs of one step, over all ranks
    # FLOPs of one step of one rank, by torch's name of the dtype of the factors
    by_dtype: Mapping[str, int] = field(default_factory=dict)
    # the least work of each phase of that step, on one device
    work: Mapping[str, Work] = field(default_factory=dict)
    # the number of batches of that step, over all ranks
    work_batches: float | None = None
    # the sum over these batches of the elements of their largest tensor; None means unknown
    work_elements: float | None = None
    # the measured peak FLOP/s of one device, by torch's name of each dtype of the run's matmuls
    ceilings: Mapping[str, float | None] = field(default_factory=dict)
    # the bytes per second that one device read and wrote in a large copy
    copied_bytes_per_s: float | None = None
    numerics: NumericsFacts | None = None
    # the time of rank 0's traced steps, as a ``KernelTable``; computed from the trace's own file
    kernels: _UNTYPED = None
    traced: _UNTYPED = None  # the same time as pieces of work and gaps: a ``Traced``

    @property
    def has_data_flow(self) -> bool:
        """Whether the data flow of a step was recorded; False for runs of older versions, in which it is unknown."""
        return self.repeats_forward is not None


_KEPT_ELSEWHERE = {"rows", "kernels", "traced"}
# cached, because creating it takes 20 ms, and many runs may be read
_adapter = cache(partial(TypeAdapter[Evidence], Evidence))


def write_evidence(folder: Path, evidence: Evidence) -> None:
    """Write ``evidence`` into ``folder``, without the rows and the trace, which have their own files."""
    content = _adapter().dump_json(evidence, exclude=_KEPT_ELSEWHERE)
    write_whole(
        folder / EVIDENCE_FILE, gzip.compress(content, compresslevel=5, mtime=0)
    )


def read_evidence(folder: Path) -> Evidence:
    """Return the evidence of the run in ``folder``, with its rows and its trace.

    Raises:
        RecordError: it is missing, or one of its files is damaged or of another kind.
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
    """Return the batch counts of each rank; empty if the run has no readable evidence."""
    try:
        return _read_file(folder / EVIDENCE_FILE).batch_counts
    except RecordError:
        return ()


def read_counters(folder: Path) -> Sequence[StepCounters]:
    """Return the counters of the measured steps of all ranks; empty if the run has no readable evidence."""
    try:
        return _read_file(folder / EVIDENCE_FILE).counters
    except RecordError:
        return ()


def _read_file(path: Path) -> Evidence:
    """Read the evidence in ``path``; raise RecordError if it is missing or damaged."""
    try:
        with gzip.open(path) as file:
            content = file.read()
        return _adapter().validate_json(content)
    except FileNotFoundError:
        raise RecordError(
            f"{path}: does not exist: a version before 0.3 wrote the run, or the run was killed"
        ) from None
    except (OSError, EOFError, zlib.error, ValidationError) as error:
        raise RecordError(
            f"{path}: is not the evidence of a run: {str(error).splitlines()[0]}"
        ) from None


def read_trace(path: Path) -> tuple[KernelTable | None, Traced | None]:
    """Return the contents of the trace in ``path``; (None, None) if there is no trace, or if it has no whole step."""
    try:
        work = read_traced_work(path)
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: {error}") from None
    if work is None:
        return None, None
    return kernel_table(work), broken_down(work)
