"""The results of the ``whatif`` stage in a few lines."""

from __future__ import annotations

from lm_profiler.record.run import PlaceSlack, RunRecord, Saving, Slack

_WHOLE = ("loader", "compute")

# the share of the largest delay from which a slack counts as "or more": a larger delay may cost nothing either
_REACHED = 0.99


def slack_lines(record: RunRecord) -> list[str]:
    """Return the slack of each place, and what a faster place would save at the middle one of its speed-ups."""
    slack = record.slack
    if slack is None:
        return []
    told = [f"{of.place} {slack_text(of)}" for of in slack.places]
    lines = [f"slack, the delay that costs nothing: {', '.join(told)}"] if told else []
    middle = middle_savings(slack)
    lines += [_saving(middle[place]) for place in _WHOLE if place in middle]
    single = [_of_place(saving) for place, saving in middle.items() if place not in _WHOLE and saving.saves_s]
    if single:
        lines.append(f"one place alone: {', '.join(single)}")
    if _in_turns(slack):
        lines.append("loader and host take turns: whatever a place is faster by, the step is")
    return lines


def _in_turns(slack: Slack) -> bool:
    """Return whether loader and host share one thread: no delay of any place costs nothing."""
    places = slack.places
    return not slack.workers and len(places) > 1 and all(of.place != "device" and not of.slack_low_s for of in places)


def _of_place(of: Saving) -> str:
    return f"{of.place} {_ms(of.faster_s)} ms faster saves {_ms(of.saves_s)} ms [{_ms(of.low_s)}, {_ms(of.high_s)}]"


def middle_savings(slack: Slack) -> dict[str, Saving]:
    """Return the middle one of the speed-ups of each place."""
    by_place = {of.place: [each for each in slack.savings if each.place == of.place] for of in slack.savings}
    return {place: savings[len(savings) // 2] for place, savings in by_place.items()}


def known_slack(of: PlaceSlack) -> tuple[float | None, tuple[float, float] | None]:
    """Return the largest delay that costs nothing and its interval; without an interval it may be more."""
    if of.slack_high_s >= _REACHED * of.largest_s:
        return of.slack_low_s or None, None
    return of.slack_s, (of.slack_low_s, of.slack_high_s)


def slack_text(of: PlaceSlack) -> str:
    """Return the slack of a place in words."""
    slack_s, interval = known_slack(of)
    if slack_s is None:
        return "unknown"
    return f"{_ms(slack_s)} ms " + ("or more" if interval is None else f"[{_ms(interval[0])}, {_ms(interval[1])}]")


def _saving(of: Saving) -> str:
    by = f" {_ms(of.faster_s)} ms a step" if of.saves_s else ""  # if it saves nothing, the speed-up does not matter
    what = f"making {'the ' * (of.place == 'loader')}{of.place}{by} faster"
    return f"{what} would save {_ms(of.saves_s)} ms a step [{_ms(of.low_s)}, {_ms(of.high_s)}]"


def _ms(seconds: float) -> str:
    """Return milliseconds with three significant digits, but none below a microsecond."""
    return f"{float(f'{seconds * 1e3:.3g}'):.3f}".rstrip("0").rstrip(".")
