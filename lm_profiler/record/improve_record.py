"""``improve.json``: the changes that ``improve`` tried, what each saved, and the final setting."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from lm_profiler.record.figure import figure
from lm_profiler.record.run_record import Newer, Part, Verb, read_part

IMPROVE_FILE, IMPROVED_CONFIG = "improve.json", "improved.yaml"

# How a comparison ended. ``SAME``: within 1 %. ``UNDECIDED``: the interval was still too wide after the last pair.
# ``FAILED``: a run failed. ``REFUSED``: a precondition does not hold, and nothing was run. ``NUMERICS``:
# FASTER, but loss or gradients are off.
TriedVerdict = Literal[
    "FASTER", "SLOWER", "SAME", "UNDECIDED", "FAILED", "REFUSED", "NUMERICS"
]

# Reasons of UNDECIDED. After the last two, more pairs would show nothing new.
ENDED = "the budget ran out"
UNLIKELY = "more pairs of runs are unlikely to show that it is faster"
NOT_FASTER = "it was not faster in two checks"
_SETTLED = (
    UNLIKELY,
    NOT_FASTER,
    # the same two reasons, as version 0.3 and earlier wrote them
    "more pairs would hardly show it to be faster",
    "it did not look faster at two checks",
)

# How a search ended. ``failed``: the first setting does not run. ``unfinished``: it still runs, or was killed.
Ended = Literal["done", "budget", "interrupted", "failed", "unfinished"]

Positive = Annotated[float, Field(gt=0)]


class Numerics(Part):
    """How much a change alters loss and gradients, with the same batches and seed. None means unknown; norms are
    Euclidean."""

    loss: float | None = figure(
        "loss off by",
        "error",
        "relative difference between the mean losses of the first steps with and without the change",
        "loss_off",
    )
    gradients: float | None = figure(
        "gradients off by",
        "error",
        "norm of the difference between the gradients with and without the change, divided by the norm without it",
        "gradients_off",
    )
    within: bool | None  # whether both are within the tolerance


class Tried(Part):
    """A change, compared with the best setting so far in ``pairs`` of fresh processes, which alternate.

    Times are scaled to the first setting's tokens or samples. The interval of ``saved_s`` holds at any stop.
    """

    name: str = figure("change", "text", "options that the change adds to the call")
    options: dict[str, str]  # the options of the change, by name without the dashes
    may_change: str | None = figure(
        "may change",
        "text",
        "results of training that the change may alter",
        default=None,
    )
    ceiling_s: float | None = figure(
        "at most",
        "ms",
        "the most that the change could save per step, estimated from the first run",
        default=None,
    )
    pairs: int = figure(
        "pairs",
        "count",
        "number of pairs of processes, without and with the change, that were compared",
        default=0,
    )
    a_s: Positive | None = figure(
        "step without",
        "ms",
        "step time without the change: geometric mean over the processes",
        default=None,
    )
    b_s: Positive | None = figure(
        "step with",
        "ms",
        "step time with the change: geometric mean over the processes",
        default=None,
    )
    saved_s: float | None = figure(
        "saved",
        "ms",
        "time saved per step, with the interval on which the verdict is based",
        interval=("low_s", "high_s"),
        default=None,
    )
    low_s: float | None = figure(
        "saved, low",
        "ms",
        "lower end of the interval of the time saved per step",
        default=None,
    )
    high_s: float | None = figure(
        "saved, high",
        "ms",
        "upper end of the interval of the time saved per step",
        default=None,
    )
    a_bytes: int | None = figure(
        "memory without",
        "bytes",
        "peak memory without the change: of the device, or of the process on a CPU",
        default=None,
    )
    b_bytes: int | None = figure(
        "memory with",
        "bytes",
        "peak memory with the change: of the device, or of the process on a CPU",
        default=None,
    )
    # None if the numbers were not checked: only those of FASTER changes are
    numerics: Numerics | None = None
    # None while it is being compared
    verdict: Annotated[TriedVerdict, Newer] | None = figure(
        "verdict",
        "text",
        "result of the comparison, and whether the change was kept",
        default=None,
    )
    accepted: bool = False
    why: str | None = figure(
        "why",
        "text",
        "reason for the verdict, if the verdict alone does not show it",
        default=None,
    )

    @property
    def needs_more_pairs(self) -> bool:
        """Whether the change was compared, and more pairs may still show that it helps."""
        return self.verdict == "UNDECIDED" and self.why not in _SETTLED


class Final(Part):
    """The final setting compared with the first, in fresh pairs of processes, which were not used to choose the
    changes."""

    pairs: int = figure(
        "last pairs",
        "count",
        "number of fresh pairs of processes, none of which was used to choose the changes",
        "final_pairs",
    )
    first_s: Positive = figure(
        "first step",
        "ms",
        "step time with the first setting: geometric mean over the processes",
        "final_first_s",
    )
    final_s: Positive = figure(
        "final step",
        "ms",
        "step time with the final setting: geometric mean over the processes",
    )
    ratio: Positive = figure(
        "times as fast",
        "x",
        "step time with the first setting divided by that with the final setting, with its 95 % interval",
        "final_ratio",
    )
    low: float = figure(
        "times as fast, low",
        "x",
        "lower end of the 95 % interval of the speed-up",
        "final_ratio_low",
    )
    high: float = figure(
        "times as fast, high",
        "x",
        "upper end of the 95 % interval of the speed-up",
        "final_ratio_high",
    )
    first_bytes: int | None = figure(
        "first memory",
        "bytes",
        "peak memory with the first setting",
        "final_first_bytes",
        default=None,
    )
    final_bytes: int | None = figure(
        "final memory", "bytes", "peak memory with the final setting", default=None
    )


@dataclass(frozen=True)
class WayPoint:
    """The step after an accepted change, with the interval known then; the first setting has no interval."""

    name: str
    step_s: float
    low_s: float | None = None
    high_s: float | None = None


class ImproveRecord(Part):
    """Everything that one call of ``improve`` tried, in that order; it is rewritten after each run."""

    schema_version: Literal[1] = 1
    name: str
    command: str
    verb: Annotated[Verb, Newer] = "fit"
    started: str
    budget_s: float = figure("budget", "s", "time that all runs together may take")
    elapsed_s: float = figure(
        "elapsed",
        "s",
        "time that all runs took, including those of later calls that continued this search",
    )
    ended: Annotated[Ended, Newer] = "unfinished"
    first_s: float | None = figure(
        "first run",
        "ms",
        "mean step time in the first run of the first setting",
        default=None,
    )
    # the options of all accepted changes together; empty if nothing helped
    options: dict[str, str] = Field(default_factory=dict)
    # the changes so far; the last may still run
    tried: list[Tried] = Field(default_factory=list)
    # the names of changes that were not tried
    left: list[str] = Field(default_factory=list)
    # None if nothing was accepted, the budget ended before, or too few of its runs succeeded
    final: Final | None = None
    runs: int = figure(
        "runs", "count", "number of processes that were started", default=0
    )
    # what a reader must know before using the figures
    notes: list[str] = Field(default_factory=list)

    @property
    def steps_after_changes(self) -> list[WayPoint]:
        """The step before the first accepted change, and after each; empty if none was accepted."""
        points: list[WayPoint] = []
        for change in self.tried:
            if not change.accepted or change.a_s is None or change.b_s is None:
                continue
            if not points:
                points.append(WayPoint("first setting", change.a_s))
            # The largest saving gives the shortest step, so the ends of the interval swap.
            low_s = None if change.high_s is None else change.a_s - change.high_s
            high_s = None if change.low_s is None else change.a_s - change.low_s
            points.append(WayPoint(change.name, change.b_s, low_s, high_s))
        return points


def read_improve(folder: Path) -> ImproveRecord:
    return read_part(folder / IMPROVE_FILE, ImproveRecord, "a record of improve")
