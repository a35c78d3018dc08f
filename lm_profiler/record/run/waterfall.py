"""The waterfall from the ideal step to the measured one, and the slack that held delays show."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lm_profiler.record.figure import figure
from lm_profiler.record.parts import PARTS
from lm_profiler.record.run.part import Newer, Part

# the terms in the order of the waterfall; ``record.quantities.TERMS`` says what each means
TermName = Literal[
    "ideal",
    "clock",
    "slow_products",
    "recomputation",
    "bandwidth",
    "beyond_bandwidth",
    "communication",
    "waiting",
    "gaps",
    "input",
    "unexplained",
]


class Contributor(Part):
    """A part of a term's time: what ran, and in which module (None is unknown, or none).

    ``detail`` has phrases separated by "; ", the one that tells most first.
    """

    module: str | None = figure("module", "text", "path, with * for the indices of equal layers")
    what: str = figure("what", "text", "operator or kernel, or in words")
    count: float = figure("times", "count", "how often in a step")
    seconds: float = figure("time", "ms", "of one step")
    detail: str | None = figure("detail", "text", "why it took so long, where that is known", default=None)


class Term(Part):
    """One term of the waterfall; the seconds of ``unexplained`` alone may be negative.

    There is no interval where one step was traced, and no ceiling where nothing could be saved. ``phases`` add up to
    the term; empty is unknown.
    """

    name: Annotated[TermName, Newer] = figure("term", "text", "a step of the waterfall")
    seconds: float = figure("time", "ms", "what it adds to the step")
    low_s: float | None = figure("from", "ms", "lower end of the 95 % interval of that", default=None)
    high_s: float | None = figure("to", "ms", "upper end of that interval", default=None)
    at_most_s: float | None = figure(
        "could save at most", "ms", "ceiling of what could be saved there, never a gain", default=None
    )
    phases: dict[str, float] = figure("{key}", "ms", "of which in {key}", keys=PARTS, default_factory=dict)
    contributors: list[Contributor] = Field(default_factory=list)


class Waterfall(Part):
    """The mean measured (untraced) step as a sum of terms; what ran in it is known from the trace of rank 0.

    Rates are those of one device. ``step_phases`` are empty where they are unknown.
    """

    step_s: float = figure(
        "step taken apart", "ms", "mean step that the terms add up to", "waterfall_step_s",
        interval=("ci_low", "ci_high"),
    )  # fmt: skip
    ci_low: float | None
    ci_high: float | None
    step_phases: dict[str, float] = figure(
        "of it in {key}", "ms", "of the mean step", "waterfall_{key}_s", keys=PARTS, default_factory=dict
    )
    source: Annotated[Literal["kernels", "operators"], Newer] = figure(
        "terms are of", "text", "kernels on the device, or operators of the host", "waterfall_source"
    )
    peak_flops_per_s: float = figure(
        "peak", "TFLOP/s", "FLOP/s of a device that the ideal is at", "waterfall_peak_flops_per_s"
    )
    peak_source: str = figure("source of the peak", "text", "where that peak is from", "waterfall_peak_source")
    bandwidth_bytes_per_s: float | None = figure(
        "bandwidth", "GB/s", "bytes that a device can move each second", "waterfall_bandwidth_bytes_per_s"
    )
    bandwidth_source: str | None = figure(
        "source of the bandwidth", "text", "where it is from", "waterfall_bandwidth_source"
    )
    clock_share: float | None = figure(
        "clock held", "%", "SM clock over the one that the peak is of", "waterfall_clock_share"
    )
    terms: list[Term]
    notes: list[str] = Field(default_factory=list)

    @property
    def untold(self) -> set[str]:
        """The terms that count in the next one, because the clock or the bandwidth is unknown."""
        rates = {"clock": self.clock_share, "bandwidth": self.bandwidth_bytes_per_s}
        return {name for name, rate in rates.items() if rate is None}


# where a delay is held: in the loader's workers; on the host before it asks for a batch (a loader without workers),
# before forward, backward or optimizer; or in the device's stream, before the kernels of forward
PlaceName = Literal["loader", "data", "forward", "backward", "optimizer", "device"]


class PlaceSlack(Part):
    """The cost of a delay in one place, in seconds a step; a small delay is one of up to a quarter of the step."""

    place: Annotated[PlaceName, Newer] = figure("place", "text", "where the delay went")
    slope: float = figure("cost of a small delay", "number", "per second of it: 1 on the critical path, 0 off it")
    slope_low: float = figure("cost, low", "number", "an end of its 95 % interval")
    slope_high: float = figure("cost, high", "number", "an end of its 95 % interval")
    slack_s: float = figure("slack", "ms", "largest delay that costs nothing")
    slack_low_s: float = figure("slack, low", "ms", "an end of its 95 % interval")
    slack_high_s: float = figure("slack, high", "ms", "an end of its 95 % interval")
    largest_s: float = figure("largest delay", "ms", "that was tried: a slack whose interval ends there may be more")


class Saving(Part):
    """What a faster place would save of the step.

    ``compute`` is the host and the device. In a loader with n workers each batch is n x faster_s faster, divided by the
    batches of a step. A place on the host is never faster by more than it takes.
    """

    place: Annotated[Literal["loader", "compute", "data", "forward", "backward", "optimizer"], Newer] = figure(
        "faster place", "text", "the loader, all else, or a place on the host"
    )
    faster_s: float = figure("faster by", "ms", "a step")
    saves_s: float = figure("would save", "ms", "of the step")
    low_s: float = figure("saves, low", "ms", "an end of its 95 % interval")
    high_s: float = figure("saves, high", "ms", "an end of its 95 % interval")


class Slack(Part):
    """The result of holding delays in the ``whatif`` stage, after timing.

    ``savings`` need a loader with ``workers``: without, loader and host take turns on one thread, and a faster place
    saves just what it is faster by. Those of single places on the host need a run without a device beside it.
    """

    step_s: float = figure(
        "step without a delay", "ms", "mean of the whatif stage's steps without a delay", "undelayed_step_s"
    )
    blocks: int = figure("delays held", "count", "of known lengths in one place at a time, without a delay included")
    workers: int = figure("delayed workers", "count", "of the loader; 0 where none can be delayed")
    places: list[PlaceSlack]
    savings: list[Saving] = Field(default_factory=list)
