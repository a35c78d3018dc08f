"""What delays of a known length cost the step: where it has slack, and what a faster place would save."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lm_profiler.record.figure import figure
from lm_profiler.record.run.part import Newer, Part

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
