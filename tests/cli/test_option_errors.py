"""The parser's messages, as it writes them, turned into a line or two."""

from __future__ import annotations

import pytest

from lm_profiler.cli.options import explain

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
        (
            "Parser key \"stages.warmup_steps\":\n  Expected a <class 'int'>. Got value: many",
            "stages.warmup_steps: expected int, given 'many'",
        ),
        (UNION, "trainer.precision: expected int or '16-true', 'bf16-true' or null, given 'fp8'"),
        (
            NESTED,
            "unknown option --model.sise; did you mean --model.size?",
        ),
        (
            NO_MODULE,
            "model: Problem with given class_path 'nope.Nope': No module named 'nope'",
        ),
        ("stages.warmup_steps: expected 0 or more, given -1", "stages.warmup_steps: expected 0 or more, given -1"),
    ],
)
def test_it_names_subject_expectation_and_value(message: str, told: str) -> None:
    assert str(explain(message, OPTIONS)) == told


def test_what_it_does_not_know_is_cut_to_a_line() -> None:
    told = str(explain("first " + "x" * 1000 + "\n\n  - second\nthird", prefix="trainer"))
    assert told.startswith("trainer: first xxx")
    assert len(told.splitlines()) == 1
    assert len(told) <= 310
    assert str(explain("-1 is not in bounds\nsecond")) == "-1 is not in bounds second"


def test_a_message_of_ours_gets_the_key_that_it_is_about() -> None:
    assert (
        str(explain("size: expected one of a, b, given 'c'", prefix="model"))
        == "model.size: expected one of a, b, given 'c'"
    )
