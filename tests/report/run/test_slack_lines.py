"""What the terminal says of slack."""

from __future__ import annotations

from stored_texts import assert_stored
from whole_record import WHOLE

from lm_profiler.record.run import PlaceName, PlaceSlack, RunRecord, Saving, Slack
from lm_profiler.report.run.slack_lines import slack_lines


def place(name: PlaceName, slack_s: float, low_s: float, high_s: float) -> PlaceSlack:
    slope = {"slope": 0.5, "slope_low": 0.4, "slope_high": 0.6}
    return PlaceSlack(place=name, **slope, slack_s=slack_s, slack_low_s=low_s, slack_high_s=high_s, largest_s=0.06)


def lines(slack: Slack | None) -> list[str]:
    return slack_lines(RunRecord.model_validate(WHOLE).model_copy(update={"slack": slack}))


SAVINGS = [
    Saving(place="loader", faster_s=0.001, saves_s=0.001, low_s=0.0009, high_s=0.0011),
    Saving(place="loader", faster_s=0.010, saves_s=0.0089, low_s=0.00812, high_s=0.0096),
    Saving(place="loader", faster_s=0.060, saves_s=0.012, low_s=0.011, high_s=0.013),
    Saving(place="compute", faster_s=0.001, saves_s=0.0, low_s=0.0, high_s=0.0),
    Saving(place="compute", faster_s=0.123456, saves_s=0.0, low_s=0.0, high_s=0.0000004),
    Saving(place="compute", faster_s=0.060, saves_s=0.0, low_s=0.0, high_s=0.0),
]
ON_HOST = [
    Saving(place=of, faster_s=faster_s, saves_s=faster_s, low_s=faster_s / 2, high_s=faster_s)
    for of, faster_s in (("compute", 0.03), ("forward", 0.02), ("optimizer", 0.001))
]
FREE = [
    place("loader", 0.0, 0.0, 0.0004),
    place("forward", 0.012, 0.0116, 0.01253),
    place("device", 0.06, 0.0587, 0.06),
]
NONE_FREE = [place("data", 0.0, 0.0, 0.001), place("forward", 0.0, 0.0, 0.001)]


def of_turns(*places: PlaceSlack) -> Slack:
    """Of a loader without workers: whoever works, the other waits."""
    return Slack(step_s=0.1, blocks=28, workers=0, places=list(places))


CASES = {
    "each place has its slack, and each faster one what it would save": Slack(
        step_s=0.1, blocks=28, workers=1, places=FREE, savings=SAVINGS
    ),
    "a place on the host is told beside all of it": Slack(step_s=0.1, blocks=28, workers=1, places=[], savings=ON_HOST),
    "where all take turns, a place saves what it is faster by": of_turns(*NONE_FREE),
    "not where there is a device behind": of_turns(*NONE_FREE, place("device", 0.0, 0.0, 0.001)),
    "nor where the host waits": of_turns(NONE_FREE[0], place("forward", 0.01, 0.009, 0.011)),
    "an interval from nothing to the largest delay says nothing": of_turns(place("data", 0.03, 0.0, 0.06)),
    "without workers there is nothing to make faster": of_turns(place("data", 0.0, 0.0, 0.001)),
    "nothing was asked": None,
}


def test_the_lines_are_as_stored() -> None:
    assert_stored("report/slack", {case: lines(slack) for case, slack in CASES.items()})
