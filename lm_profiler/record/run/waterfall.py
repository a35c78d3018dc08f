"""The waterfall from the ideal step to the measured one."""

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
