"""What the terminal says of slack."""

from __future__ import annotations

from whole_record import WHOLE

from lm_profiler.record.run import PlaceName, PlaceSlack, RunRecord, Saving, Slack
from lm_profiler.report.run.slack_lines import slack_lines


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


def test_a_place_on_the_host_is_told_beside_all_of_it() -> None:
    savings = [
        Saving(place=of, faster_s=faster_s, saves_s=faster_s, low_s=faster_s / 2, high_s=faster_s)
        for of, faster_s in (("compute", 0.03), ("forward", 0.02), ("optimizer", 0.001))
    ]
    assert lines(Slack(step_s=0.1, blocks=28, workers=1, places=[], savings=savings)) == [
        "making compute 30 ms a step faster would save 30 ms a step [15, 30]",
        "one place alone: forward 20 ms faster saves 20 ms [10, 20], optimizer 1 ms faster saves 1 ms [0.5, 1]",
    ]


def test_where_all_take_turns_a_place_saves_what_it_is_faster_by() -> None:
    places = [place("data", 0.0, 0.0, 0.001), place("forward", 0.0, 0.0, 0.001)]
    told = "loader and host take turns: whatever a place is faster by, the step is"
    assert lines(Slack(step_s=0.1, blocks=28, workers=0, places=places))[1:] == [told]
    behind = [*places, place("device", 0.0, 0.0, 0.001)]
    assert lines(Slack(step_s=0.1, blocks=28, workers=0, places=behind))[1:] == []
    waiting = [places[0], place("forward", 0.01, 0.009, 0.011)]
    assert lines(Slack(step_s=0.1, blocks=28, workers=0, places=waiting))[1:] == []


def test_an_interval_from_nothing_to_the_largest_delay_says_nothing() -> None:
    slack = Slack(step_s=0.1, blocks=28, workers=0, places=[place("data", 0.03, 0.0, 0.06)])
    assert lines(slack) == ["slack, the delay that costs nothing: data unknown"]


def test_without_workers_there_is_nothing_to_make_faster() -> None:
    slack = Slack(step_s=0.1, blocks=28, workers=0, places=[place("data", 0.0, 0.0, 0.001)])
    assert lines(slack) == ["slack, the delay that costs nothing: data 0 ms [0, 1]"]


def test_nothing_is_said_where_nothing_was_asked() -> None:
    assert lines(None) == []
