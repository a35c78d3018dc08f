"""From the ideal step to the measured one, in terms that add up; and where delays show slack."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lm_profiler.record.figure import figure
from lm_profiler.record.parts import PARTS
from lm_profiler.record.run.part import Newer, Part

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
"""In the order of the waterfall.

``ideal``: the model's FLOPs at the peak. ``clock``: what the same take longer because the device held a lower clock
than the peak is stated for. ``slow_products``: what matrix products and fused attention take beyond both.
``recomputation``: what activation checkpointing repeats. ``bandwidth``: memory-bound kernels, if they moved their bytes
at the full bandwidth; ``beyond_bandwidth``: what they take longer. ``communication``: that no other kernel hides.
``waiting``: for other ranks, which only mending those saves. ``gaps``: the device waited for the host, or at a
synchronization. ``input``: it waited for data and its transfer.
"""


class Contributor(Part):
    """What a term consists of, most of it first. ``seconds`` and ``count`` are of one step.

    ``module`` is a path with ``*`` for indices, so that equal layers are one; None is unknown, or none. ``what`` is
    what ran there: an operator, a kernel, or in words; ``detail`` why it took so long, where that is known: phrases
    with "; " between, the one that tells most first.
    """

    module: str | None = figure("module", "text", "path, with * for the indices of equal layers")
    what: str = figure("what", "text", "operator or kernel, or in words")
    count: float = figure("times", "count", "how often in a step")
    seconds: float = figure("time", "ms", "of one step")
    detail: str | None = figure("detail", "text", "why it took so long, where that is known", default=None)


class Term(Part):
    """One step of the waterfall. ``seconds`` of ``unexplained`` may be negative; of others they are not.

    The 95 % interval is from ``low_s`` to ``high_s``: traced steps scatter, and so does the mean step that gaps are the
    rest of; None where one step was traced. ``at_most_s`` is a ceiling of what could be saved here, never a gain: None
    where nothing could. ``phases`` are the seconds of it in each phase of the step (and ``other``), which add up to it;
    empty where that is unknown.
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
    """Where the milliseconds of a step went. The terms, each there once, add up to ``step_s``.

    ``step_s`` is the mean of the measured (untraced) steps, in its 95 % interval from ``ci_low`` to ``ci_high``; what
    ran in it is known from the trace of rank 0. ``source`` says what the terms are of: ``kernels`` on the device, or
    the host's ``operators`` where the device is the CPU. Rates are one device's; ``*_source`` say where each is from.
    ``step_phases`` are the seconds of each phase in ``step_s``; empty where that is unknown.
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
        """Terms that nobody can tell from the one after them, because the clock or the bandwidth is unknown."""
        rates = {"clock": self.clock_share, "bandwidth": self.bandwidth_bytes_per_s}
        return {name for name, rate in rates.items() if rate is None}


PlaceName = Literal["loader", "data", "forward", "backward", "optimizer", "device"]
"""Where a delay goes: into the loader's workers; on the host before it asks for a batch (a loader without workers),
before forward, backward or optimizer; into the device's stream, before forward's kernels."""


class PlaceSlack(Part):
    """What a delay in one place costs. Intervals are of 95 %; delays are seconds a step.

    ``slope`` is what a small delay (up to a quarter of the step) costs, per second of it: 1 on the critical path, 0 off
    it. ``slack_s`` is the largest delay that costs nothing; where its interval ends at ``largest_s``, the largest that
    was tried, it may be more.
    """

    place: Annotated[PlaceName, Newer] = figure("place", "text", "where the delay went")
    slope: float = figure("cost of a small delay", "number", "per second of it: 1 on the critical path, 0 off it")
    slope_low: float = figure("cost, low", "number", "an end of its 95 % interval")
    slope_high: float = figure("cost, high", "number", "an end of its 95 % interval")
    slack_s: float = figure("slack", "ms", "largest delay that costs nothing")
    slack_low_s: float = figure("slack, low", "ms", "an end of its 95 % interval")
    slack_high_s: float = figure("slack, high", "ms", "an end of its 95 % interval")
    largest_s: float = figure("largest delay", "ms", "that was tried: a slack whose interval ends there may be more")


class Saving(Part):
    """What a place that is ``faster_s`` a step faster would save of the step, with its 95 % interval.

    ``compute`` is all that is no loader: host and device. Of a loader with n workers, each batch is n x faster_s
    faster, divided by the batches of a step. A place on the host is never faster by more than it takes.
    """

    place: Annotated[Literal["loader", "compute", "data", "forward", "backward", "optimizer"], Newer] = figure(
        "faster place", "text", "the loader, all else, or a place on the host"
    )
    faster_s: float = figure("faster by", "ms", "a step")
    saves_s: float = figure("would save", "ms", "of the step")
    low_s: float = figure("saves, low", "ms", "an end of its 95 % interval")
    high_s: float = figure("saves, high", "ms", "an end of its 95 % interval")


class Slack(Part):
    """An experiment after timing. ``step_s`` is the mean step without a delay, over ``blocks`` held delays in all.

    ``savings`` are of loaders with ``workers``: elsewhere loader and host take turns on one thread, where a place that
    is faster saves just that. Of single places on the host they are where there is no device beside it.
    """

    step_s: float = figure(
        "step without a delay", "ms", "mean of the whatif stage's steps without a delay", "undelayed_step_s"
    )
    blocks: int = figure("delays held", "count", "of known lengths in one place at a time, without a delay included")
    workers: int = figure("delayed workers", "count", "of the loader; 0 where none can be delayed")
    places: list[PlaceSlack]
    savings: list[Saving] = Field(default_factory=list)
