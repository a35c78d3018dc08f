"""``improve.json``: what ``improve`` tried, what each change brought, and the setting that it ended with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from lm_profiler.record.figure import figure
from lm_profiler.record.run import Newer, Part, Verb, read_as

IMPROVE_FILE, IMPROVED_CONFIG = "improve.json", "improved.yaml"

TriedVerdict = Literal["FASTER", "SLOWER", "SAME", "UNDECIDED", "FAILED", "REFUSED", "NUMERICS"]
"""``SAME``: within 1 %. ``UNDECIDED``: the interval did not decide in the pairs that it was given. ``FAILED``: a run
did not end well. ``REFUSED``: a precondition does not hold, and nothing was run. ``NUMERICS``: FASTER, with numbers
that are off.
"""

Ended = Literal["done", "budget", "interrupted", "failed", "unfinished"]
"""``failed``: the first setting does not run. ``unfinished`` is what it is called while it runs, and what it stays
where its process was killed.
"""

Positive = Annotated[float, Field(gt=0)]


class Numerics(Part):
    """How far off the numbers with a change are; None where unknown.

    ``loss`` is how far the mean loss of the first steps is from that without it, over the same batches and seed, as a
    share. ``gradients`` is the Euclidean norm of the gradients' difference from float32's, over the norm of float32's.
    """

    loss: float | None = figure(
        "loss off by", "error", "how far the mean loss of the first steps is from that without the change, as a share",
        "loss_off",
    )  # fmt: skip
    gradients: float | None = figure(
        "gradients off by", "error", "norm of the gradients' difference to float32, over its norm", "gradients_off"
    )
    within: bool | None
    """Whether both are within the tolerance."""


class Tried(Part):
    """A change, compared with the best setting so far in ``pairs`` of fresh processes, which alternate.

    Seconds are of a mean step, scaled to the tokens or samples of the first setting's step: the geometric mean of
    its processes without the change (``a_s``) and with it (``b_s``). ``saved_s`` is their difference, from ``low_s`` to
    ``high_s``, an interval that holds whenever the comparison stopped. ``ceiling_s`` is the most that it could save, by
    what the first run says. Bytes are of the peak. None where unknown.
    """

    name: str = figure("change", "text", "what the call gets more")
    options: dict[str, str]
    """What the call gets more, by the options' names without the dashes."""
    may_change: str | None = figure("may change", "text", "what of the results it may change", default=None)
    ceiling_s: float | None = figure(
        "at most", "ms", "the most that it could save, as the first run tells it", default=None
    )
    pairs: int = figure("pairs", "count", "of processes that were compared", default=0)
    a_s: Positive | None = figure(
        "step without", "ms", "without the change: the geometric mean of the processes' mean steps", default=None
    )
    b_s: Positive | None = figure(
        "step with", "ms", "with the change: the geometric mean of the processes' mean steps", default=None
    )
    saved_s: float | None = figure(
        "saved", "ms", "the difference, with the interval that decided", interval=("low_s", "high_s"), default=None
    )
    low_s: float | None = figure("saved, low", "ms", "an end of that interval", default=None)
    high_s: float | None = figure("saved, high", "ms", "an end of that interval", default=None)
    a_bytes: int | None = figure(
        "memory without", "bytes", "peak without the change: of the device's tensors, on the CPU of the process",
        default=None,
    )  # fmt: skip
    b_bytes: int | None = figure(
        "memory with", "bytes", "peak with the change: of the device's tensors, on the CPU of the process", default=None
    )
    numerics: Numerics | None = None
    """None where nobody looked: only what is FASTER is checked."""
    verdict: Annotated[TriedVerdict, Newer] | None = figure(
        "verdict", "text", "how the comparison ended, and whether the change was kept", default=None
    )
    """None while it is being compared."""
    accepted: bool = False
    why: str | None = figure("why", "text", "of a verdict that does not say it alone", default=None)


class Final(Part):
    """The final against the first setting in ``pairs`` of processes that nothing was chosen by.

    ``ratio`` is first over final, how many times as fast, from ``low`` to ``high``.
    """

    pairs: int = figure("last pairs", "count", "of processes that nothing was chosen by", "final_pairs")
    first_s: Positive = figure(
        "first step", "ms", "step of the first setting: the geometric mean of the processes' mean steps",
        "final_first_s",
    )  # fmt: skip
    final_s: Positive = figure(
        "final step", "ms", "step of the final setting: the geometric mean of the processes' mean steps"
    )
    ratio: Positive = figure("times as fast", "x", "first step over final step, with its interval", "final_ratio")
    low: float = figure("times as fast, low", "x", "an end of that interval", "final_ratio_low")
    high: float = figure("times as fast, high", "x", "an end of that interval", "final_ratio_high")
    first_bytes: int | None = figure(
        "first memory", "bytes", "peak with the first setting: of the device's tensors, on the CPU of the process",
        "final_first_bytes", default=None,
    )  # fmt: skip
    final_bytes: int | None = figure(
        "final memory", "bytes", "peak with the final setting: of the device's tensors, on the CPU of the process",
        default=None,
    )  # fmt: skip


@dataclass(frozen=True)
class WayPoint:
    """The step after a change was accepted, and the interval that was known then; the first setting has none."""

    name: str
    step_s: float
    low_s: float | None = None
    high_s: float | None = None


class ImproveRecord(Part):
    """All that one call of ``improve`` tried, in that order. Written anew after each answer."""

    schema_version: Literal[1] = 1
    name: str
    command: str
    verb: Annotated[Verb, Newer] = "fit"
    started: str
    budget_s: float = figure("budget", "s", "time that all runs may take")
    elapsed_s: float = figure("elapsed", "s", "time that runs took, over all calls that went on with it")
    ended: Annotated[Ended, Newer] = "unfinished"
    first_s: float | None = figure(
        "first run", "ms", "step of the first setting's first run, before anything was compared", default=None
    )
    options: dict[str, str] = Field(default_factory=dict)
    """Of all accepted changes together; empty where nothing helped."""
    tried: list[Tried] = Field(default_factory=list)
    """Some may be under way."""
    left: list[str] = Field(default_factory=list)
    """Names of changes that nobody came to."""
    final: Final | None = None
    """None where nothing was accepted, the budget ended before, or too few of its runs ended well."""
    runs: int = figure("runs", "count", "processes that were asked for", default=0)
    notes: list[str] = Field(default_factory=list)
    """What a reader must know before using the figures."""

    @property
    def way(self) -> list[WayPoint]:
        """The step before the first accepted change, and after each; empty where nothing was accepted."""
        points: list[WayPoint] = []
        for of in self.tried:
            if of.accepted and of.a_s is not None and of.b_s is not None:
                low_s, high_s = (None if saved is None else of.a_s - saved for saved in (of.high_s, of.low_s))
                points += [] if points else [WayPoint("first setting", of.a_s)]
                points.append(WayPoint(of.name, of.b_s, low_s, high_s))
        return points


def read_improve(folder: Path) -> ImproveRecord:
    """Read ``folder/improve.json``.

    Raises:
        RecordError: there is none, or it is damaged, foreign or of a later version of the format.
    """
    return read_as(folder / IMPROVE_FILE, ImproveRecord, "a record of improve")


@dataclass(frozen=True)
class Searched:
    """What is in the folder of one call of ``improve``."""

    folder: Path
    record: ImproveRecord
