"""Slack as the pages draw it: what delays cost each place, and what a faster one would save."""

from __future__ import annotations

from typing import Any

from lm_profiler.record.run import PlaceSlack, RunRecord
from lm_profiler.report.run.slack import known_slack, middle_savings, slack_text


def slack_answer(record: RunRecord) -> dict[str, Any] | None:
    """A bar a place, in seconds; None where no delays were asked for. An unknown slack has a text and no bar."""
    slack = record.slack
    if slack is None or not slack.places:
        return None
    return {
        "step_s": slack.step_s,
        "places": [_place(of) for of in slack.places],
        "savings": [of.model_dump() for of in middle_savings(slack).values()],
    }


def _place(of: PlaceSlack) -> dict[str, Any]:
    slack_s, interval = known_slack(of)
    low_s, high_s = interval or (None, None)
    known = {"slack_s": slack_s, "low_s": low_s, "high_s": high_s}
    slopes = {"slope": of.slope, "slope_low": of.slope_low, "slope_high": of.slope_high}
    return {"place": of.place, "text": slack_text(of), **slopes, **known}
