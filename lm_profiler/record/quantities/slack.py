"""Slack, by intervention: what delays cost, and rows of the places that were delayed and of what faster ones save."""

from __future__ import annotations

from lm_profiler.record.quantities.quantity import figure, figures_of

SLACK = figures_of(
    "slack",
    ("step_s", "step without a delay", "ms", "mean of the whatif stage's steps without a delay", "undelayed_step_s"),
    ("blocks", "delays held", "count", "of known lengths in one place at a time, without a delay included"),
    ("workers", "delayed workers", "count", "of the loader; 0 where none can be delayed"),
)
_END = "an end of its 95 % interval"

PLACE_ROW = (
    figure("place", "place", "text", "where the delay went"),
    figure("slope", "cost of a small delay", "number", "per second of it: 1 on the critical path, 0 off it"),
    figure("slope_low", "cost, low", "number", _END),
    figure("slope_high", "cost, high", "number", _END),
    figure("slack_s", "slack", "ms", "largest delay that costs nothing"),
    figure("slack_low_s", "slack, low", "ms", _END),
    figure("slack_high_s", "slack, high", "ms", _END),
    figure("largest_s", "largest delay", "ms", "that was tried: a slack whose interval ends there may be more"),
)
SAVING_ROW = (
    figure("place", "faster place", "text", "the loader, all else, or a place on the host"),
    figure("faster_s", "faster by", "ms", "a step"),
    figure("saves_s", "would save", "ms", "of the step"),
    figure("low_s", "saves, low", "ms", _END),
    figure("high_s", "saves, high", "ms", _END),
)
