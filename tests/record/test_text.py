"""What a terminal would obey is spelled out."""

from __future__ import annotations

import pytest

from lm_profiler.record.text import printable, ranks_text


@pytest.mark.parametrize(
    "given, shown",
    [
        ("größe 模型 ± –\n\tx", "größe 模型 ± –\n\tx"),
        ("\x1b[2J", "\\x1b[2J"),  # C0: clears a screen
        ("\x9b31m", "\\x9b31m"),  # C1: the same in one character
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),  # an order to the system
        ("a\rb\x08", "a\\rb\\x08"),
        ("\u202etxt", "\\u202etxt"),  # turns the direction of writing
        ("\udcff", "\\udcff"),
    ],
)
def test_controls_are_spelled_out_and_letters_stay(given: str, shown: str) -> None:
    assert printable(given) == shown


@pytest.mark.parametrize(
    "ranks, said",
    [([3], "rank 3"), ([1, 0], "ranks 0–1"), ([7, 2, 4, 3, 5, 0], "ranks 0, 2–5, 7"), (range(16384), "ranks 0–16383")],
)
def test_many_ranks_are_named_in_a_few_words(ranks: list[int], said: str) -> None:
    assert ranks_text(ranks) == said
