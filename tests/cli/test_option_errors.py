"""The parser's messages, as it writes them, turned into a line or two."""

from __future__ import annotations

from stored_texts import assert_stored

from lm_profiler.cli.option_errors import explain

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
SUBCLASS = """\
Parser key "trainer.strategy":
  Does not validate against any of the Union subtypes
  Subtypes: [<class 'str'>, <class 'lightning.pytorch.strategies.strategy.Strategy'>]
  Errors:
    - Expected a <class 'str'>
    - Not a valid subclass of Strategy
      Subclass types expect one of:
      - a class path (str)
      - a dict with class_path entry
      - a dict without class_path but with init_args entry (class path given previously)
      - a dict with parameters accepted by the base class (implicit class_path)
  Given value type: <class 'list'>
  Given value: [{'class_path': 'lightning.pytorch.strategies.DDPStrategy', 'init_args': {}}]"""


MESSAGES = {
    "unrecognized": "unrecognized arguments: --bogus=3",
    "of a verb": "Subcommand 'fit' does not accept option 'trainer.presision'",
    "of a group": "Option 'stages.warmup' is not accepted",
    "a group": "Subcommand 'fit' does not accept option 'modle.size'",
    "a type": "Parser key \"stages.warmup_steps\":\n  Expected a <class 'int'>. Got value: many",
    "a union": UNION,
    "nested": NESTED,
    "no module": NO_MODULE,
    "a list for a class": SUBCLASS,
    "no value": "argument --model: expected one argument",
    "ours": "stages.warmup_steps: expected 0 or more, given -1",
}


def test_it_names_subject_expectation_and_value_as_stored() -> None:
    assert_stored("cli/explained: known", {case: str(explain(said, OPTIONS)) for case, said in MESSAGES.items()})


def test_what_it_does_not_know_is_cut_to_a_line() -> None:
    told = str(explain("first " + "x" * 1000 + "\n\n  - second\nthird", prefix="trainer"))
    assert told.startswith("trainer: first xxx")
    assert len(told.splitlines()) == 1
    assert len(told) <= 310
    assert str(explain("-1 is out\nsecond")) == "-1 is out second"


def test_a_message_of_ours_gets_the_key_that_it_is_about() -> None:
    ours = "size: expected 3, given 4"
    assert str(explain(ours, prefix="model")) == f"model.{ours}"
