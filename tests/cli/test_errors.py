"""The parser's messages, as it writes them, turned into a line or two."""

from __future__ import annotations

import pytest

from lm_profiler.cli.errors import explain

OPTIONS = ["model", "model.size", "trainer", "trainer.precision", "stages", "stages.warmup_steps", "name"]
UNION = """\
Parser key "trainer.precision":
  Does not validate against any of the Union subtypes
  Subtypes: [typing.Literal[64, 32], typing.Literal['16-true', 'bf16-true'], <class 'NoneType'>]
  Errors:
    - Expected a <class 'int'>
    - Expected a typing.Literal['16-true', 'bf16-true']
    - Expected a <class 'NoneType'>
  Given value type: <class 'str'>
  Given value: fp8"""
NESTED = """\
Parser key "model":
  Does not validate against any of the Union subtypes
  Subtypes: [<class 'lightning.pytorch.core.module.LightningModule'>, <class 'NoneType'>]
  Errors:
    - unknown option --sise; did you mean --size?
    - Expected a <class 'NoneType'>
  Given value type: <class 'dict'>
  Given value: {'sise': 'small'}"""
NO_MODULE = """\
Parser key "model":

  - Expected a path but nope.Nope either not accessible or invalid
  - Does not validate against any of the Union subtypes
  Errors:
    - Problem with given class_path 'nope.Nope':
        No module named 'nope'
    - Expected a <class 'NoneType'>
  Given value type: <class 'str'>
  Given value: nope.Nope"""


@pytest.mark.parametrize(
    "message,told",
    [
        (
            "unrecognized arguments: --bogus=3",
            "unknown option --bogus; see --help",
        ),
        (
            "Subcommand 'fit' does not accept option 'trainer.presision'",
            "unknown option --trainer.presision; did you mean --trainer.precision?",
        ),
        (
            "Option 'stages.warmup' is not accepted",
            "unknown option --stages.warmup; did you mean --stages.warmup_steps?",
        ),
        (
            "Subcommand 'fit' does not accept option 'modle.size'",
            "unknown option --modle.size; did you mean --model.size?",
        ),
        ("argument -c/--config: expected one argument", "config: expected one argument, given none"),
        (
            "Parser key \"stages.warmup_steps\":\n  Expected a <class 'int'>. Got value: many",
            "stages.warmup_steps: expected int, given 'many'",
        ),
        (UNION, "trainer.precision: expected one of int, 16-true, bf16-true or null, given 'fp8'"),
        (
            NESTED,
            "unknown option --model.sise; did you mean --model.size?",
        ),
        (
            NO_MODULE,
            "model: expected a class that can be imported, given 'nope.Nope' (No module named 'nope')",
        ),
        ("stages.warmup_steps: expected 0 or more, given -1", "stages.warmup_steps: expected 0 or more, given -1"),
    ],
)
def test_it_names_subject_expectation_and_value(message: str, told: str) -> None:
    assert str(explain(message, OPTIONS)) == told


def test_what_it_does_not_know_is_cut_to_two_lines() -> None:
    told = explain("first " + "x" * 1000 + "\n\n  second\nthird", prefix="trainer")
    told = str(told).splitlines()
    assert len(told) == 2
    assert told[0].startswith("trainer:")
    assert len(told[0]) <= 310
    assert told[1] == "second"


def test_a_switch_that_has_options_is_true_or_false() -> None:
    types = "[<class 'bool'>, <class 'lm_profiler.callbacks.profiling_options.WatchOptions'>]"
    errors = "- Expected a <class 'bool'>\n    - Expected a dot import path string: 7"
    told = explain(f'Parser key "watch":\n  Subtypes: {types}\n  Errors:\n    {errors}\n  Given value: 7')
    assert str(told) == "watch: expected true or false, given '7'; its parts are --watch.…"


def test_a_message_of_ours_gets_the_key_that_it_is_about() -> None:
    assert (
        str(explain("size: expected one of a, b, given 'c'", prefix="model"))
        == "model.size: expected one of a, b, given 'c'"
    )
