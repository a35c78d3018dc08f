"""``run.json``, the record of one run, and ``ended.rank<n>.json`` of each rank that did not end well."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from lm_profiler.record.figure import Place, figure, within
from lm_profiler.record.files import RecordError
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
from lm_profiler.record.run.waterfall import Slack, Waterfall
from lm_profiler.record.text import ranks_text

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
    overrides: dict[str, str] = Field(default_factory=dict)
    """Options that the command line gave beside the config file, by their name without the dashes."""
    config: dict[str, Any] | None
    environment: Environment | None = within(group="Machine", default=None)
    model: ModelFacts | None = within(group="Model", default=None)
    steps: dict[str, int] = figure(
        "{word} steps", "count", "steps of the {word} stage", "steps_{key}", keys=STAGES, default_factory=dict
    )
    """How many steps each stage finished."""
    steps_planned: dict[str, int] = figure(
        "{word} steps planned", "count", "for the {word} stage", "steps_planned_{key}", keys=STAGES,
        default_factory=dict,
    )  # fmt: skip
    first_step_s: float | None = figure("first step", "ms", "the run's first step, compilation included", default=None)
    """The run's first step, compilation and lazy initialisation included."""
    between_steps_s: float | None = figure(
        "between steps", "ms", "time of the measure stage in no step: validation, epoch ends", default=None
    )
    """Time of the measure stage that lies in no step: validation, epoch ends and the instruments' own work."""
    between: list[BetweenSteps] = Field(default_factory=list)
    """What that time went to, the longest first."""
    time: dict[str, TimeSummary] = Field(default_factory=dict)
    """Per part, step and forward_backward, each or none: on the device's stream, or the host where there is none."""
    host_time: dict[str, TimeSummary] = Field(default_factory=dict)
    shares: dict[str, float] = figure(
        "{word} share", "%", "share of {word} in the mean step", "{key}_share", keys=_SHARED, place=Place.ASKED,
        group="Shares of the typical step", default_factory=dict,
    )  # fmt: skip
    """Shares of each part in the mean step, which add up to 1, and of forward_backward."""
    odd_steps: list[OddStep] = Field(default_factory=list)
    step_counters: list[StepCounters] = Field(default_factory=list)
    """First the usual counters, then those of each odd step on the rank that it names; empty where no step is odd."""
    rank_step_s: list[float] = figure("median step", "ms", "median step of each rank", default_factory=list)
    """Median step of each rank; the summaries are of each step's mean over the ranks."""
    loader: LoaderFacts | None = within(group="Steps", default=None)
    """None for verbs other than fit."""
    planned: PlannedMemory | None = within(group="Planned memory", default=None)
    """None where nothing was planned: ``--check_memory=false``, a module or a Trainer of one's own."""
    memory: MemoryFacts | None = within(group="Memory", default=None)
    throughput: Throughput | None = within(group="Throughput", default=None)
    steadiness: Steadiness | None = within(group="Steadiness", default=None)
    utilisation: Utilisation | None = within(group="Use of the hardware", default=None)
    rates: Rates | None = within(group="Use of the hardware", default=None)
    """The rates that the figures are compared with."""
    floors: dict[str, Floor] = within(
        group="Floors", keys=PHASES[1:], name="{key}_{name}", title="{key}: {title}", place=Place.ASKED,
        default_factory=dict,
    )  # fmt: skip
    """The least time on rank 0's device of each phase that occurred in a step of the memory stage."""
    telemetry: Telemetry | None = within(group="GPU", default=None)
    contention: Contention | None = within(group="What else used the machine", default=None)
    syncs: list[Sync] | None = None
    """None where nothing waits for a device, or none was looked for."""
    other_by_owner: OtherByOwner | None = within(group="Other, by its owner", default=None)
    """None where no step was timed action by action."""
    thread_use: dict[str, ThreadUse] = within(
        group="Use of the CPU", keys=PARTS, name="{key}_{name}", title="{key} {title} (ms)",
        meaning="in {key}, {meaning}", place=Place.ASKED, default_factory=dict,
    )  # fmt: skip
    """What rank 0's training thread did in each phase of those steps; empty where the system does not say."""
    python_times: list[PythonTime] = Field(default_factory=list)
    """The lines of the program with most of the time that is not torch's, in one step of rank 0."""
    numerics: NumericsFacts | None = within(group="Numerics", default=None)
    """None where the precision was not audited."""
    settings: Settings | None = None
    mean_counters: StepCounters | None = within(
        group="Counters of the mean step", name="mean_{name}", title="{title}, on average", place=Place.ASKED,
        instead={"step": None, "rank": None}, default=None,
    )  # fmt: skip
    """The mean of each counter over the measured steps of rank 0."""
    findings: list[Finding] = Field(default_factory=list)
    """What takes time that could be saved, the most likely saving first."""
    verdict: Verdict | None = within(group="How it ended", default=None)
    waterfall: Waterfall | None = within(group="Waterfall", default=None)
    """None where no peak is known, or no step was traced."""
    slack: Slack | None = within(group="Slack", default=None)
    """None where no delays were asked for."""
    ranks: Ranks | None = within(group="Ranks", default=None)
    """None for a single rank, or where nothing says who waited for whom; ``notes`` say why."""
    notes: list[str] = Field(default_factory=list)
    """What a reader must know before using the figures; shown under the table."""
    details: list[str] = Field(default_factory=list)
    """Further notes on floors and terms."""

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
    """Read ``folder/run.json``.

    Raises:
        RecordError: there is none, or it is damaged, foreign or of a later version of the format.
    """
    return read_as(folder / "run.json", RunRecord, "a run record")


class RankEnd(Part):
    """How a rank ended that did not end well: ``ended.rank<n>.json``."""

    status: Annotated[Status, Newer]
    failure: Failure
    at: float
    """Seconds since 1970, on the clock of its host."""
    followed: bool = False
    """Whether another rank's end caused it: a collective failed, or nothing was left to wait for."""

    @property
    def is_signalled(self) -> bool:
        """Whether a signal ended it that launchers send, too, once another rank is lost; Ctrl-C is the user's."""
        return self.status == "interrupted" and self.failure.type != "KeyboardInterrupt"


def end_file(rank: int) -> str:
    """Return the name of the rank's file in the run's folder."""
    return f"ended.rank{rank}.json"


def read_ends(folder: Path) -> dict[int, RankEnd]:
    """Return the ends that ranks left in ``folder``, as far as they can be read."""
    ends: dict[int, RankEnd] = {}
    for path in sorted(folder.glob("ended.rank*.json")):
        with suppress(RecordError):
            if (rank := path.name.split(".")[1].removeprefix("rank")).isdecimal():
                ends[int(rank)] = read_as(path, RankEnd, "a rank's end")
    return ends


RANK_LOST = "RankLost"  # type of the failure where a rank ended without leaving a word


def first_end(ends: Mapping[int, RankEnd], ranks: Iterable[int], codes: Mapping[int, int | None]) -> RankEnd | None:
    """Return the end that caused the others: the first that followed from none, or that of a rank that left none.

    Args:
        ends: what ranks left.
        ranks: all that there are.
        codes: their exit codes, as far as they are known; None of one that runs.
    """
    # Hosts' clocks differ by milliseconds; an end that follows from another comes later than that, or is marked.
    first = min((end for end in ends.values() if not end.followed), key=lambda end: end.at, default=None)
    if first is not None and not first.is_signalled:
        return first
    silent = [rank for rank in ranks if rank not in ends]
    # Beside a signal, a rank that is known to run, or to have ended well, is no cause.
    lost = [rank for rank in silent if codes.get(rank, -1)] or (silent if first is None else [])
    near = next(iter(ends.values()), None)
    if not lost or near is None:
        return first or near
    how = how_it_ended(codes[lost[0]]) if lost[0] in codes else "ended without a word"
    more = f"; so did {ranks_text(lost[1:])}" if len(lost) > 1 else ""
    host = near.failure.host if lost[0] in codes else None  # whoever knows the code has started it
    changes = {"type": RANK_LOST, "message": f"{how}{more}", "rank": lost[0], "host": host, "out_of_memory": None}
    return RankEnd(status="failed", failure=near.failure.model_copy(update=changes), at=near.at)


def how_it_ended(code: int | None) -> str:
    """Return in words how a process ended, from its exit code; None: it runs."""
    if code is None:
        return "hangs, or was not reached by what ended the others"
    if code == 0:
        return "had no step left to do while the others had: do the ranks' loaders differ in length?"
    if code > 0:
        return f"ended with exit code {code}"
    known = -code in {*signal.Signals}
    return f"killed by {signal.Signals(-code).name if known else f'signal {-code}'}"
