"""What ``lm_profiler why TRACE`` answers: where the time of any trace's steps went. Seconds are over all ``steps``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lm_profiler.record.kernels import KernelTable
from lm_profiler.record.run_record import Newer, Part, Waterfall

# What the host did while the device was idle. ``queued``: it had launched the next kernel already; ``launching``: it
# had not launched it yet; ``waiting``: it waited for the device; ``driver``: another call of the driver; ``input``: it
# handled a batch; ``end``: it launched nothing more. ``python``, without a device: no operator ran.
IdleCause = Literal[
    "queued", "launching", "waiting", "driver", "input", "end", "python"
]


LaunchVerdict = Literal["launch-bound", "partly launch-bound", "not launch-bound"]

# Where the steps come from: ranges that the profiler names ``ProfilerStep#``, ranges of a name that was requested, or
# nothing, so that the whole trace is one step.
StepSource = Literal["ProfilerStep", "range", "whole"]


class IdleTime(Part):
    """Idle times of one cause in one phase."""

    cause: Annotated[IdleCause, Newer]
    phase: str
    # what the host did meanwhile: the call that it was in, the operator that it launched next or was in
    what: str
    count: int
    total_s: float


class LaunchFacts(Part):
    """Whether the device waits for the host to launch kernels; ``verdict`` follows from the share of
    ``launching_s``."""

    kernels: int
    # time in which the device was idle because the host had not launched the next kernel yet
    launching_s: float
    # time in which the device was idle because the host had waited for it
    waiting_s: float
    # From the end of a launch to the start of its kernel. If it is near the least time of a launch, the queue is empty.
    median_delay_s: float
    verdict: Annotated[LaunchVerdict, Newer]


class CollectiveSum(Part):
    """The collectives of one kind; during ``exposed_s`` of their time no compute kernel ran."""

    name: str
    count: int
    total_s: float
    exposed_s: float


class CommunicationTime(Part):
    """The time of all collectives; if several run at the same time, that time counts once."""

    total_s: float
    exposed_s: float
    by_name: list[CollectiveSum]


class CopyTime(Part):
    """Copies of one kind, such as those from pageable memory; ``bytes`` is unknown where a copy has none."""

    name: str
    count: int
    total_s: float
    bytes: int | None


class TraceFloor(Part):
    """The least time of the traced work on ``device``: products at its peak, other kernels at its bandwidth."""

    device: str
    products_s: float | None
    memory_s: float | None
    # measured time of kernels whose work the trace does not show; it is in neither of the two above
    unknown_s: float
    source: str


class TraceAnswer(Part):
    """One trace. ``kernels.window_s`` is the time of all steps, which ``busy_s`` and ``idle_s`` add up to."""

    schema_version: Literal[1] = 1
    trace: str
    device: str | None
    rank: int | None
    world_size: int | None
    # if the file holds the work of several processes, the process that is shown; otherwise None
    process: str | None = None
    steps: int = Field(gt=0)
    step_source: Annotated[StepSource, Newer]
    step_name: str | None
    busy_s: float
    idle_s: float
    kernels: KernelTable
    idle: list[IdleTime]  # idle times, the longest first
    launches: LaunchFacts | None  # None if the trace has no device
    communication: CommunicationTime | None
    copies: list[CopyTime]
    floor: TraceFloor | None
    waterfall: Waterfall | None
    left_out: dict[str, int]  # the number of damaged events, by the kind of damage
    notes: list[str]


class TraceSide(Part):
    """One of two traces that are compared; times are of one step."""

    trace: str
    device: str | None
    steps: int
    step_s: float


# ``came`` and ``went``: only in B, only in A; ``same``: within 2 %
Change = Literal["came", "went", "slower", "faster", "same"]


class TimeDifference(Part):
    """The time and the calls of one kind, operator or kernel per step in A and in B. ``module`` is None in tables that
    do not distinguish modules."""

    name: str
    module: str | None
    change: Annotated[Change, Newer]
    a_s: float
    b_s: float
    a_calls: float
    b_calls: float


class TraceComparison(Part):
    """Two traces side by side. The differences of each list add up to that of the busy time before overlaps.

    ``kinds`` also has the idle time, and the overlap of work at the same time, so that it adds up to the step.
    """

    schema_version: Literal[1] = 1
    a: TraceSide
    b: TraceSide
    kinds: list[TimeDifference]
    operators: list[TimeDifference]  # differences by operator and module
    kernels: list[TimeDifference]
    notes: list[str]


class RankTime(Part):
    """The times of one rank per step. It waited ``waited_s`` for others, and each other rank waited ``caused_s`` for it
    on average."""

    rank: int
    trace: str
    step_s: float
    communication_s: float
    exposed_s: float
    waited_s: float
    caused_s: float


class RankWait(Part):
    """How long ``rank`` waited in collectives of one kind for the rank that came last, per step."""

    collective: str
    rank: int
    last_rank: int
    calls: float
    waited_s: float


class TraceRanks(Part):
    """The traces of several ranks: which rank waits for which."""

    schema_version: Literal[1] = 1
    steps: int
    ranks: list[RankTime]
    waits: list[RankWait]  # the waits, the longest first
    matched: int  # the number of collective calls that could be compared on all ranks
    unmatched: int  # the number of collective calls that the traces of other ranks lack
    notes: list[str]
