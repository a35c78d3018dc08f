"""``improve.json``: what ``improve`` tried, what each change brought, and the setting that it ended with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from lm_profiler.record.run import Newer, Part, Verb, read_as

IMPROVE_FILE, IMPROVED_CONFIG = "improve.json", "improved.yaml"

TriedVerdict = Literal["FASTER", "SLOWER", "SAME", "UNDECIDED", "FAILED", "REFUSED", "NUMERICS"]
"""``SAME``: within 1 %. ``UNDECIDED``: the budget ended before the interval decided. ``FAILED``: its runs do not end
well. ``REFUSED``: a precondition does not hold, and nothing was run. ``NUMERICS``: FASTER, with numbers that are off.
"""

Ended = Literal["done", "budget", "interrupted", "failed", "unfinished"]
"""``unfinished`` is what it is called while it runs, and what it stays where its process was killed."""


class NumericsBeside(Part):
    """The same batches and seed without (``a``) and with (``b``) a change; None where unknown.

    ``loss`` is of the last step. ``gradient_error`` is the Euclidean norm of the gradients' difference from float32's
    over the norm of float32's. ``loss_tolerance`` bounds the loss's change as a share, ``gradient_tolerance`` b's
    error.
    """

    loss_a: float | None
    loss_b: float | None
    gradient_error_a: float | None
    gradient_error_b: float | None
    loss_tolerance: float
    gradient_tolerance: float
    within: bool | None


class Tried(Part):
    """A change, compared with the best setting so far in ``pairs`` of fresh processes, which alternate.

    Seconds are of a step's median, scaled to the tokens or samples of the first setting's step: ``a_s`` without the
    change, ``b_s`` with it. ``saved_s`` is their difference with its interval, which holds at whatever pair the
    comparison stopped. ``ceiling_s`` is what the first run said that it could save at most. Bytes are of the peak.
    None where unknown.
    """

    name: str
    options: dict[str, str]
    """What the call gets more, by the options' names without the dashes."""
    may_change: str | None = None
    """What it may change in the results."""
    ceiling_s: float | None = None
    pairs: int = 0
    a_s: float | None = None
    b_s: float | None = None
    saved_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    a_bytes: int | None = None
    b_bytes: int | None = None
    numerics: NumericsBeside | None = None
    verdict: Annotated[TriedVerdict, Newer] | None = None
    """None while it is being compared."""
    accepted: bool = False
    why: str | None = None
    """Why it failed, was refused or was not taken."""


class WayPoint(Part):
    """The step after a change was accepted, with its 95 % interval; the first point is the first setting."""

    name: str
    step_s: float
    low_s: float
    high_s: float


class Final(Part):
    """The final against the first setting, in ``pairs`` of processes that no choice was made by.

    ``ratio`` is first over final: how many times as fast, with its 95 % interval.
    """

    first_s: float
    final_s: float
    ratio: float
    low: float
    high: float
    pairs: int
    first_bytes: int | None = None
    final_bytes: int | None = None


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
    first_options: dict[str, str] = Field(default_factory=dict)
    final_options: dict[str, str] = Field(default_factory=dict)
    """Of all accepted changes together; empty where nothing helped."""
    tried: list[Tried] = Field(default_factory=list)
    left: list[str] = Field(default_factory=list)
    """Names of changes that nobody came to."""
    way: list[WayPoint] = Field(default_factory=list)
    final: Final | None = None
    """None where nothing was accepted, or the budget ended before."""
    cells: int = 0
    """Processes that were run in all."""
    notes: list[str] = Field(default_factory=list)
    """What a reader must know before using the figures."""


def read_improve(folder: Path) -> ImproveRecord:
    """Read ``folder/improve.json``.

    Raises:
        RecordError: there is none, or it is damaged, foreign or of a later version of the format.
    """
    return read_as(folder / IMPROVE_FILE, ImproveRecord, "a record of improve")
