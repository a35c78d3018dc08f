"""Text and YAML of people come back as they were written."""

from __future__ import annotations

import pytest
import yaml
from raised import refusal
from stored_texts import assert_stored

from lm_profiler.record.text import (
    MOST_NODES,
    YamlTextError,
    check_size,
    compose,
    printable,
    ranks_text,
    text_without_keys,
)


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


def test_yaml_keeps_its_values_as_they_were_written_and_aliases_count_as_often_as_they_repeat_one() -> None:
    thousand = f"a: &a [{'1, ' * 999}1]\n"
    lines = [f"k{i}: *a\n" for i in range(MOST_NODES // 1000)]
    check_size(thousand + "".join(lines[:50]))
    with pytest.raises(YamlTextError, match=r"^has more than 100,000 values$"):
        check_size(thousand + "".join(lines))
    node = compose("a: 1\nb: {c: 010, d: on, e: 1e-3, f: '1'}\n")
    assert isinstance(node, yaml.MappingNode)
    assert text_without_keys(node, {"a"}) == "b: {c: 010, d: on, e: 1e-3, f: '1'}\n"
    with pytest.raises(yaml.YAMLError):
        check_size("[1")
    said = refusal(YamlTextError, lambda: compose("[1"))
    assert_stored("record/problems: no YAML", {"before its parser's words": said.partition(": ")[0]})
