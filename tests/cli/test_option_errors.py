"""The parser's messages, as it writes them, turned into a line or two."""

from lm_profiler.cli.option_errors import explain


def test_an_error_is_one_line_with_option_and_value() -> None:
    message = str(explain("first " + "x" * 1000 + "\n\n  - second\nthird", prefix="trainer"))
    assert message.startswith("trainer: first xxx")
    assert len(message.splitlines()) == 1
    assert len(message) <= 310
    assert str(explain("-1 is out\nsecond")) == "-1 is out second"
    ours = "size: expected 3, given 4"
    assert str(explain(ours, prefix="model")) == f"model.{ours}"
    # Each line of the tree ends with the value as it was read: the next line is no part of it.
    line = "Expected a <class 'int'>. Got value: 1000.0"
    message = UNION.format(key="num_layers", error=line, more=". Got value: 1000.0", given="1e3")
    assert str(explain(message)) == "num_layers: expected int or null, given '1e3'"
    assert str(explain(line, prefix="data.seed")) == "data.seed: expected int, given '1000.0'"
    two_lines = UNION.format(key="name", error="Expected a <class 'int'>", more="", given="a\nb")
    assert str(explain(two_lines)).endswith("given 'a\\nb'")
    message = UNION.format(
        key="model", error="argument of type 'NoneType' is not iterable", more="", given="{'class_path': None}"
    )
    assert str(explain(message)) == "model: expected class path or null, given \"{'class_path': None}\""


UNION = """\
Parser key "{key}":
  Does not validate against any of the Union subtypes
  Subtypes: [<class 'int'>, <class 'NoneType'>]
  Errors:
    - {error}
    - Expected a <class 'NoneType'>{more}
  Given value type: <class 'str'>
  Given value: {given}"""
