"""The parser's messages, as it writes them, turned into a line or two."""

from __future__ import annotations

from lm_profiler.cli.option_errors import explain


def test_what_it_does_not_know_is_cut_to_a_line() -> None:
    told = str(explain("first " + "x" * 1000 + "\n\n  - second\nthird", prefix="trainer"))
    assert told.startswith("trainer: first xxx")
    assert len(told.splitlines()) == 1
    assert len(told) <= 310
    assert str(explain("-1 is out\nsecond")) == "-1 is out second"


def test_a_message_of_ours_gets_the_key_that_it_is_about() -> None:
    ours = "size: expected 3, given 4"
    assert str(explain(ours, prefix="model")) == f"model.{ours}"
