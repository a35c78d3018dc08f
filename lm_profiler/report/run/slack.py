"""What the delays of the ``whatif`` stage say, in two lines."""

from __future__ import annotations

from lm_profiler.record.run import PlaceSlack, RunRecord, Saving

_REACHED = 0.99
"""Of the largest delay that was tried: a larger one may cost nothing too."""


def slack_lines(record: RunRecord) -> list[str]:
    """The slack of each place; then what a faster place would save, each at the middle one of its speed-ups."""
    slack = record.slack
    if slack is None:
        return []
    lines = [f"slack, the delay that costs nothing: {', '.join(map(_slack, slack.places))}"] if slack.places else []
    by_place = {of.place: [each for each in slack.savings if each.place == of.place] for of in slack.savings}
    return lines + [_saving(savings[len(savings) // 2]) for savings in by_place.values()]


def _slack(of: PlaceSlack) -> str:
    if of.slack_high_s >= _REACHED * of.largest_s:
        if of.slack_low_s == 0.0:
            return f"{of.place} unknown"
        return f"{of.place} {_ms(of.slack_low_s)} ms or more"
    return f"{of.place} {_ms(of.slack_s)} ms [{_ms(of.slack_low_s)}, {_ms(of.slack_high_s)}]"


def _saving(of: Saving) -> str:
    by = f" {_ms(of.faster_s)} ms a step" if of.saves_s else ""  # of what saves nothing it does not matter by how much
    what = f"making {'the ' * (of.place == 'loader')}{of.place}{by} faster"
    return f"{what} would save {_ms(of.saves_s)} ms a step [{_ms(of.low_s)}, {_ms(of.high_s)}]"


def _ms(seconds: float) -> str:
    """Three figures, but nothing below a microsecond."""
    return f"{float(f'{seconds * 1e3:.3g}'):.3f}".rstrip("0").rstrip(".")
