"""A search among programs whose times are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from lm_profiler.analysis.improve.search import improve
from lm_profiler.analysis.improve.trials import Candidate, Checked, Improvement, Ran, Trial


def searched(
    candidates: Sequence[Candidate], seconds: Callable[[Mapping[str, str]], float], budget_s: float = 1e3
) -> Improvement:
    """The end of a search in which a run takes ten seconds and every winner is right."""
    going = improve(candidates, budget_s)
    try:
        asked = next(going)
        while True:
            asked = going.send(Ran(seconds(asked.options), 10.0) if isinstance(asked, Trial) else Checked(True))
    except StopIteration as end:
        return end.value


def test_winners_are_kept_and_the_rest_is_tried_on_top_of_them() -> None:
    share = {"half": 0.5, "third": 0.7, "worse": 1.5}
    candidates = [Candidate(name, {name: "1"}, name, ceiling_s=-share[name]) for name in share]

    def seconds(options: Mapping[str, str]) -> float:
        product = 1.0
        for name in options:
            product *= share[name]
        return product

    end = searched(candidates, seconds)

    assert [(one.candidate.name, one.verdict) for one in end.tried if one.candidate] == [
        ("half", "FASTER"),
        ("third", "FASTER"),
        ("worse", "SLOWER"),
    ]
    assert end.options == {"half": "1", "third": "1"}
    assert end.tried[1].a_options == {"half": "1"}
    assert end.last is not None
    assert end.last.verdict == "FASTER"
    assert end.last.interval is not None
    assert end.last.interval.ratio == pytest.approx(0.35)
    assert end.ended == "done"
