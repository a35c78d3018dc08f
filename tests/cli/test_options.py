"""The options of a verb: what a dataclass makes of a command line and of a file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from raised import refusal
from stored_texts import assert_stored

from lm_profiler.cli.main import main
from lm_profiler.cli.options import UNLIMITED, OptionsReader, options_in
from lm_profiler.usage_error import UsageError


@dataclass(frozen=True, kw_only=True)
class Baking:
    """Bake bread.

    Then eat it.

    Args:
        config: A YAML file of these options.
        loaves: What goes into the oven.
        flours: By name.
        minutes: Of each try.
        degrees: Of the oven.
        kind: Of bread.
        fan: Whether it turns.
        spices: How much of each.
        options: Of the oven.
        command: All of it.
    """

    WORDS: ClassVar[str] = "loaves"
    FILE: ClassVar[str] = "config"

    config: str | None = None
    loaves: Sequence[Path] = ()
    flours: Sequence[str] = ()
    minutes: Sequence[int] = ()
    degrees: float = 200.0
    kind: Literal["rye", "wheat"] | None = None
    fan: bool = False
    spices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    options: Sequence[str] = ()
    command: str = ""

    def __post_init__(self) -> None:
        if self.fan and self.degrees > 250:
            raise UsageError("degrees: expected at most 250 with fan, given more")


def bake(*arguments: str) -> Baking:
    return OptionsReader("bake", Baking).read(arguments)


def test_forms_of_options() -> None:
    made = bake(
        *("a.dough", "--minutes", "10", "20", "--flours=rye,010", "--fan", "b.dough", "--degrees", "2.5e2"),
        *("--spices.seed.caraway", "1e-3,[on, 2]", "--oven.door=shut", "--oven.light"),
    )
    assert made.loaves == [Path("a.dough"), Path("b.dough")]
    assert (made.minutes, made.flours, made.fan, made.degrees) == ([10, 20], ["rye", "010"], True, 250.0)
    assert made.spices == {"seed.caraway": ["1e-3", "[on, 2]"]}  # text, as it was written
    assert made.options == ["--oven.door=shut", "--oven.light"]
    assert "bake a.dough" in made.command
    assert "--minutes 10 20" in made.command
    assert bake() == Baking(command="python -m lm_profiler bake", options=[])
    assert bake("--degrees=1", "--degrees=2").degrees == 2.0


def test_the_command_line_precedes_the_file(tmp_path: Path) -> None:
    file = tmp_path / "bake.yaml"
    file.write_text(
        "loaves: [a.dough]\nminutes: [5]\nkind: rye\nfan: true\nspices: {salt: [010], seed.anise: [2, [on, 3]]}\n"
        "degrees: 180\n"
    )
    made = bake("--config", str(file), "--minutes=7,8", "--spices.salt=3")
    assert (made.loaves, made.minutes, made.kind, made.fan) == ([Path("a.dough")], [7, 8], "rye", True)
    assert (made.degrees, made.spices) == (180.0, {"salt": ["3"], "seed.anise": ["2", "[on, 3]"]})
    file.write_text("mintes: [5]\n")
    message = refusal(UsageError, lambda: bake("--config", str(file)))
    assert_stored("cli/option_values: file", {"mintes": message})


REFUSED = [
    ["--minuts=3"],
    ["--kind=oat"],
    ["--degrees=hot"],
    ["--minutes", "1", "x.dough"],
    ["--minutes"],
    ["--fan=maybe"],
    ["--spices=salt"],
    ["--fan", "--degrees=300"],
    ["--config="],
]


def test_a_wrong_call_is_a_message_in_a_line_as_stored() -> None:
    messages = {}
    for arguments in REFUSED:
        with pytest.raises(UsageError) as error:
            bake(*arguments)
        messages[" ".join(arguments)] = message = str(error.value)
        assert "\n" not in message
    assert_stored("cli/options", messages)
    values = ",".join(map(str, range(20_000)))  # which jsonargparse reads for minutes
    message = refusal(UsageError, lambda: bake(f"--spices.rye={values}"))
    assert_stored("cli/option_values: many", {"of a key": message})


def test_help_is_of_the_dataclass():
    text = OptionsReader("bake", Baking).help("for example:\n  bake it")
    assert_stored("cli/bake", {"--help": text})
    options = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    fields = ("loaves", "flours", "minutes", "degrees", "kind", "fan", "spices.KEY")
    assert options == ["--config", *(f"--{name}" for name in fields)]


def test_options_take_the_words_that_they_can() -> None:
    takes = {"many": UNLIMITED, "two": 2, "flag": 0}
    line = ["a", "-c", "f.yaml", "--many", "1", "-2", "--two", "3", "4", "5", "--flag", "6", "--x=-7", "--", "-h"]
    found = [option[:2] for option in options_in(line, lambda name: takes.get(name, 1))]
    assert found == [
        *[("", ["a"]), ("config", ["f.yaml"]), ("many", ["1", "-2"]), ("two", ["3", "4"]), ("", ["5"])],
        *[("flag", []), ("", ["6"]), ("x", ["-7"]), ("", ["--"]), ("help", [])],
    ]


def test_report_takes_its_options_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "table.yaml").write_text("columns: [help]\n")
    assert main(["report", "--config", str(tmp_path / "table.yaml")]) == 0
    listed = capsys.readouterr().out
    assert main(["report", "--columns", "help"]) == 0
    assert capsys.readouterr().out == listed
