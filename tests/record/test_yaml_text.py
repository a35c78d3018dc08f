"""YAML of any size and shape: what is taken, and what is not."""

from __future__ import annotations

import pytest
import yaml

from lm_profiler.record.yaml_text import MOST_NODES, TooLarge, YamlTextError, check_size, compose, without


def test_aliases_count_as_often_as_they_repeat_a_value() -> None:
    thousand = f"a: &a [{'1, ' * 999}1]\n"
    lines = [f"k{i}: *a\n" for i in range(MOST_NODES // 1000)]
    check_size(thousand + "".join(lines[:50]))
    with pytest.raises(TooLarge, match=r"^has more than 100,000 values$"):
        check_size(thousand + "".join(lines))


def test_keys_are_taken_out_and_other_values_stay_as_they_were_written() -> None:
    node = compose("a: 1\nb: {c: 010, d: on, e: 1e-3, f: '1'}\n")
    assert isinstance(node, yaml.MappingNode)
    assert without(node, {"a"}) == "b: {c: 010, d: on, e: 1e-3, f: '1'}\n"


def test_what_is_no_yaml_is_not_too_large() -> None:
    with pytest.raises(yaml.YAMLError):
        check_size("[1")
    with pytest.raises(YamlTextError, match=r"^is not YAML at line 2: "):
        compose("[1")
