"""Text and YAML of people come back as they were written."""

import pytest
import yaml
from raised import refusal
from stored_texts import assert_stored

from lm_profiler.record.text import YamlTextError, compose, printable, ranks_text, text_without_keys


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
def test_control_characters_are_spelled_out(given: str, shown: str) -> None:
    assert printable(given) == shown


@pytest.mark.parametrize(
    "ranks, words",
    [([3], "rank 3"), ([1, 0], "ranks 0–1"), ([7, 2, 4, 3, 5, 0], "ranks 0, 2–5, 7"), (range(16384), "ranks 0–16383")],
)
def test_many_ranks_are_named_in_a_few_words(ranks: list[int], words: str) -> None:
    assert ranks_text(ranks) == words


def test_yaml_keeps_its_values_as_they_were_written() -> None:
    node = compose("a: 1\nb: {c: 010, d: on, e: 1e-3, f: '1'}\n")
    assert isinstance(node, yaml.MappingNode)
    assert text_without_keys(node, {"a"}) == "b: {c: 010, d: on, e: 1e-3, f: '1'}\n"
    message = refusal(YamlTextError, lambda: compose("[1"))
    assert_stored("record/problems: no YAML", {"before its parser's words": message.partition(": ")[0]})
