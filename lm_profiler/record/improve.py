"""``improve.json``: what ``improve`` tried, what each change brought, and the setting that it ended with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

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

    loss: float | None
    gradients: float | None
    within: bool | None
    """Whether both are within the tolerance."""


class Tried(Part):
    """A change, compared with the best setting so far in ``pairs`` of fresh processes, which alternate.

    Seconds are of a mean step, scaled to the tokens or samples of the first setting's step: the geometric mean of
    its processes without the change (``a_s``) and with it (``b_s``). ``saved_s`` is their difference, from ``low_s`` to
    ``high_s``, an interval that holds whenever the comparison stopped. ``ceiling_s`` is the most that it could save, by
    what the first run says. Bytes are of the peak. None where unknown.
    """

    name: str
    options: dict[str, str]
    """What the call gets more, by the options' names without the dashes."""
    may_change: str | None = None
    """What it may change in the results."""
    ceiling_s: float | None = None
    pairs: int = 0
    a_s: Positive | None = None
    b_s: Positive | None = None
    saved_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    a_bytes: int | None = None
    b_bytes: int | None = None
    numerics: Numerics | None = None
    """None where nobody looked: only what is FASTER is checked."""
    verdict: Annotated[TriedVerdict, Newer] | None = None
    """None while it is being compared."""
    accepted: bool = False
    why: str | None = None
    """Of a verdict that does not say it alone."""


class Final(Part):
    """The final against the first setting in ``pairs`` of processes that nothing was chosen by.

    ``ratio`` is first over final, how many times as fast, from ``low`` to ``high``.
    """

    pairs: int
    first_s: Positive
    final_s: Positive
    ratio: Positive
    low: float
    high: float
    first_bytes: int | None = None
    final_bytes: int | None = None


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
    budget_s: float
    elapsed_s: float
    """Over all calls that went on with it."""
    ended: Annotated[Ended, Newer] = "unfinished"
    first_s: float | None = None
    """The step of the first setting's first run, before anything was compared."""
    options: dict[str, str] = Field(default_factory=dict)
    """Of all accepted changes together; empty where nothing helped."""
    tried: list[Tried] = Field(default_factory=list)
    """Some may be under way."""
    left: list[str] = Field(default_factory=list)
    """Names of changes that nobody came to."""
    final: Final | None = None
    """None where nothing was accepted, the budget ended before, or too few of its runs ended well."""
    runs: int = 0
    """Processes that were asked for in all."""
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
