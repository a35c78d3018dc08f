"""What the terminal says of slack."""

from __future__ import annotations

from whole_record import WHOLE

from lm_profiler.record.run import PlaceName, PlaceSlack, RunRecord, Saving, Slack
from lm_profiler.report.run.slack import slack_lines


def place(name: PlaceName, slack_s: float, low_s: float, high_s: float) -> PlaceSlack:
    slope = {"slope": 0.5, "slope_low": 0.4, "slope_high": 0.6}
    return PlaceSlack(place=name, **slope, slack_s=slack_s, slack_low_s=low_s, slack_high_s=high_s, largest_s=0.06)


def lines(slack: Slack | None) -> list[str]:
    return slack_lines(RunRecord.model_validate(WHOLE).model_copy(update={"slack": slack}))


def test_each_place_has_its_slack_and_each_faster_one_what_it_would_save() -> None:
    places = [
        place("loader", 0.0, 0.0, 0.0004),
        place("forward", 0.012, 0.0116, 0.01253),
        place("device", 0.06, 0.0587, 0.06),
    ]
    savings = [
        Saving(place="loader", faster_s=0.001, saves_s=0.001, low_s=0.0009, high_s=0.0011),
        Saving(place="loader", faster_s=0.010, saves_s=0.0089, low_s=0.00812, high_s=0.0096),
        Saving(place="loader", faster_s=0.060, saves_s=0.012, low_s=0.011, high_s=0.013),
        Saving(place="compute", faster_s=0.001, saves_s=0.0, low_s=0.0, high_s=0.0),
        Saving(place="compute", faster_s=0.123456, saves_s=0.0, low_s=0.0, high_s=0.0000004),
        Saving(place="compute", faster_s=0.060, saves_s=0.0, low_s=0.0, high_s=0.0),
    ]
    assert lines(Slack(step_s=0.1, blocks=28, workers=1, places=places, savings=savings)) == [
        "slack, the delay that costs nothing: loader 0 ms [0, 0.4], forward 12 ms [11.6, 12.5], device 58.7 ms or more",
        "making the loader 10 ms a step faster would save 8.9 ms a step [8.12, 9.6]",
        "making compute faster would save 0 ms a step [0, 0]",
    ]


def test_an_interval_from_nothing_to_the_largest_delay_says_nothing() -> None:
    slack = Slack(step_s=0.1, blocks=28, workers=0, places=[place("data", 0.03, 0.0, 0.06)])
    assert lines(slack) == ["slack, the delay that costs nothing: data unknown"]


def test_without_workers_there_is_nothing_to_make_faster() -> None:
    slack = Slack(step_s=0.1, blocks=28, workers=0, places=[place("data", 0.0, 0.0, 0.001)])
    assert lines(slack) == ["slack, the delay that costs nothing: data 0 ms [0, 1]"]


def test_nothing_is_said_where_nothing_was_asked() -> None:
    assert lines(None) == []
