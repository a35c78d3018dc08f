"""What delays of a known length cost the step: where it has slack, and what a faster place would save."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

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

    place: Annotated[PlaceName, Newer]
    slope: float
    slope_low: float
    slope_high: float
    slack_s: float
    slack_low_s: float
    slack_high_s: float
    largest_s: float


class Saving(Part):
    """What a place that is ``faster_s`` a step faster would save of the step, with its 95 % interval.

    ``compute`` is all that is no loader: host and device. Of a loader with n workers, each batch is n x faster_s
    faster, divided by the batches of a step. A place on the host is never faster by more than it takes.
    """

    place: Annotated[Literal["loader", "compute", "data", "forward", "backward", "optimizer"], Newer]
    faster_s: float
    saves_s: float
    low_s: float
    high_s: float


class Slack(Part):
    """An experiment after timing. ``step_s`` is the mean step without a delay, over ``blocks`` held delays in all.

    ``savings`` are of loaders with ``workers``: elsewhere loader and host take turns on one thread, where a place that
    is faster saves just that. Of single places on the host they are where there is no device beside it.
    """

    step_s: float
    blocks: int
    workers: int
    places: list[PlaceSlack]
    savings: list[Saving] = Field(default_factory=list)
