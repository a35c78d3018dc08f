"""``run.json``, the record of one run, and ``ended.rank<n>.json`` of each rank that did not end well."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from lm_profiler.record.figure import Place, figure, within
from lm_profiler.record.parts import MEANINGS, PARTS, PHASES, STAGES, WORDS
from lm_profiler.record.run.findings import Failure, Finding, NumericsFacts, Verdict
from lm_profiler.record.run.machine import (
    Contention,
    Environment,
    ModelFacts,
    Rates,
    Settings,
    Sync,
    Telemetry,
    Utilisation,
)
from lm_profiler.record.run.memory_facts import Floor, MemoryFacts, PlannedMemory
from lm_profiler.record.run.part import Newer, Part, read_as
from lm_profiler.record.run.ranks import Ranks
from lm_profiler.record.run.timing import (
    BetweenSteps,
    LoaderFacts,
    OddStep,
    OtherByOwner,
    PythonTime,
    Steadiness,
    StepCounters,
    ThreadUse,
    Throughput,
    TimeSummary,
)
from lm_profiler.record.run.waterfall import Waterfall

_SHARED = {part: word for part, word in WORDS.items() if part != "step"}

# ``unfinished`` is what a run is called while it runs, and what it stays where its process was killed
Status = Literal["ok", "oom", "failed", "interrupted", "refused", "unfinished"]

Verb = Literal["fit", "validate", "test", "predict"]


class RunRecord(Part):
    """The whole record of one run, in seconds and bytes."""

    schema_version: Literal[1] = 1
    name: str
    status: Annotated[Status, Newer]
    failure: Failure | None = within(group="How it ended")
    verb: Annotated[Verb, Newer]
    started: str
    duration_s: float = figure("whole run", "s", "from the start of the run to its end")
    command: str
    # options that the command line gave beside the config file, by their name without the dashes
    overrides: dict[str, str] = Field(default_factory=dict)
    config: dict[str, Any] | None
    environment: Environment | None = within(group="Machine", default=None)
    model: ModelFacts | None = within(group="Model", default=None)
    # how many steps each stage finished
    steps: dict[str, int] = figure(
        "{word} steps", "count", "steps of the {word} stage", "steps_{key}", keys=STAGES, default_factory=dict
    )
    steps_planned: dict[str, int] = figure(
        "{word} steps planned", "count", "for the {word} stage", "steps_planned_{key}", keys=STAGES,
        default_factory=dict,
    )  # fmt: skip
    # the run's first step, compilation and lazy initialisation included
    first_step_s: float | None = figure("first step", "ms", "the run's first step, compilation included", default=None)
    # time of the measure stage that lies in no step: validation, epoch ends and the instruments' own work
    between_steps_s: float | None = figure(
        "between steps", "ms", "time of the measure stage in no step: validation, epoch ends", default=None
    )
    between: list[BetweenSteps] = Field(default_factory=list)  # what that time went to, the longest first
    # per part, step and forward_backward, each or none: on the device's stream, or the host where there is none
    time: dict[str, TimeSummary] = Field(default_factory=dict)
    host_time: dict[str, TimeSummary] = Field(default_factory=dict)
    # shares of each part in the mean step, which add up to 1, and of forward_backward
    shares: dict[str, float] = figure(
        "{word} share", "%", "share of {word} in the mean step", "{key}_share", keys=_SHARED, place=Place.ASKED,
        group="Shares of the typical step", default_factory=dict,
    )  # fmt: skip
    odd_steps: list[OddStep] = Field(default_factory=list)
    # first the usual counters, then those of each odd step on the rank that it names; empty where no step is odd
    step_counters: list[StepCounters] = Field(default_factory=list)
    # median step of each rank; the summaries are of each step's mean over the ranks
    rank_step_s: list[float] = figure("median step", "ms", "median step of each rank", default_factory=list)
    loader: LoaderFacts | None = within(group="Steps", default=None)  # None for verbs other than fit
    # None where nothing was planned: ``--check_memory=false``, a module or a Trainer of one's own
    planned: PlannedMemory | None = within(group="Planned memory", default=None)
    memory: MemoryFacts | None = within(group="Memory", default=None)
    throughput: Throughput | None = within(group="Throughput", default=None)
    steadiness: Steadiness | None = within(group="Steadiness", default=None)
    utilisation: Utilisation | None = within(group="Use of the hardware", default=None)
    # the rates that the figures are compared with
    rates: Rates | None = within(group="Use of the hardware", default=None)
    # the least time on rank 0's device of each phase that occurred in a step of the memory stage
    floors: dict[str, Floor] = within(
        group="Floors", keys=PHASES[1:], name="{key}_{name}", title="{key}: {title}", place=Place.ASKED,
        default_factory=dict,
    )  # fmt: skip
    telemetry: Telemetry | None = within(group="GPU", default=None)
    contention: Contention | None = within(group="What else used the machine", default=None)
    syncs: list[Sync] | None = None  # None where nothing waits for a device, or none was looked for
    # None where no step was timed action by action
    other_by_owner: OtherByOwner | None = within(group="Other, by its owner", default=None)
    # what rank 0's training thread did in each phase of those steps; empty where the system does not say
    thread_use: dict[str, ThreadUse] = within(
        group="Use of the CPU", keys=PARTS, name="{key}_{name}", title="{key} {title} (ms)",
        meaning="in {key}, {meaning}", place=Place.ASKED, default_factory=dict,
    )  # fmt: skip
    # the lines of the program with most of the time that is not torch's, in one step of rank 0
    python_times: list[PythonTime] = Field(default_factory=list)
    numerics: NumericsFacts | None = within(group="Numerics", default=None)  # None where the precision was not audited
    settings: Settings | None = None
    # the mean of each counter over the measured steps of rank 0
    mean_counters: StepCounters | None = within(
        group="Counters of the mean step", name="mean_{name}", title="{title}, on average", place=Place.ASKED,
        instead={"step": None, "rank": None}, default=None,
    )  # fmt: skip
    # what takes time that could be saved, the most likely saving first
    findings: list[Finding] = Field(default_factory=list)
    verdict: Verdict | None = within(group="How it ended", default=None)
    # None where no peak is known, or no step was traced
    waterfall: Waterfall | None = within(group="Waterfall", default=None)
    """None where no delays were asked for."""
    # None for a single rank, or where nothing says who waited for whom; ``notes`` say why
    ranks: Ranks | None = within(group="Ranks", default=None)
    # what a reader must know before using the figures; shown under the table
    notes: list[str] = Field(default_factory=list)
    details: list[str] = Field(default_factory=list)  # further notes on floors and terms

    @property
    def words(self) -> list[str]:
        """The words for the measured steps, the gravest first; none where the steps are too few."""
        shared = ["shared"] if self.contended else []
        return ([] if self.steadiness is None else self.steadiness.words) + shared

    @property
    def contended(self) -> bool:
        """Whether others used the machine: times are then upper bounds, and utilisation says nothing."""
        return self.contention is not None and self.contention.shared

    @property
    def stretch(self) -> slice:
        """The measured steps that the figures are of."""
        known = self.steadiness
        if known is None:
            return slice(0, None)
        return slice(known.cut if known.first is None else known.first - 1, known.last)

    @field_validator("time", "host_time")
    @classmethod
    def _whole(cls, times: dict[str, TimeSummary]) -> dict[str, TimeSummary]:
        # A run that died before its first measured step has no times at all; readers index the others by any part.
        if times and (missing := [part for part in MEANINGS if part not in times]):
            raise ValueError(f"has no {', '.join(missing)}")
        return times


def read_run(folder: Path) -> RunRecord:
    """Read ``folder/run.json``."""
    return read_as(folder / "run.json", RunRecord, "a run record")


class RankEnd(Part):
    """How a rank ended that did not end well: ``ended.rank<n>.json``."""

    status: Annotated[Status, Newer]
    failure: Failure
    at: float  # seconds since 1970, on the clock of its host
    followed: bool = False  # whether another rank's end caused it: a collective failed, or nothing was left to wait for


def cause_of(ends: Sequence[RankEnd]) -> RankEnd | None:
    """Return the earliest end that followed from no other; None where every one did."""
    # Hosts' clocks differ by milliseconds; an end that follows from another comes later than that, or is marked.
    return min((end for end in ends if not end.followed), key=lambda end: end.at, default=None)


def end_file(rank: int) -> str:
    """Return the name of the rank's file in the run's folder."""
    return f"ended.rank{rank}.json"
