"""`compare` as it is called: what it refuses, prints and writes, and its exit codes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from compared import CONFIG, ENVIRONMENT, MODEL, rows_near_10_ms, write_run
from made_improve import made_improve, made_search
from refused import assert_refused_as_stored

from lm_profiler.cli.main import main
from lm_profiler.cli.options import OptionsReader
from lm_profiler.cli.verbs import compare
from lm_profiler.record.process_spread import ProcessSpread, save_spread
from lm_profiler.usage_error import UsageError


def run(arguments: Sequence[str]) -> int:
    return compare.run(OptionsReader("compare", compare.Options).read(arguments))


def written_run(folder: Path, scale: float = 1.0, **changes: Any) -> str:
    return str(write_run(folder, rows_near_10_ms(scale), **changes))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    """B takes a fifth longer."""
    return written_run(tmp_path / "before"), written_run(tmp_path / "after", 1.2)


def test_differences_are_printed_before_table_and_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    math = {**CONFIG, "model": {"class_path": "LM", "init_args": {"attention": "math"}}}
    run([written_run(tmp_path / "a"), written_run(tmp_path / "b", 1.2, config=math)])
    lines = capsys.readouterr().out.splitlines()
    places = [
        next(i for i, line in enumerate(lines) if line.startswith(start))
        for start in (
            "A:",
            "  model.attention: sdpa → math",
            "environments: the same",
            "step  ",
            "forward  ",
            "verdict:",
        )
    ]
    assert places == sorted(places)
    step = lines[places[3]].split()
    assert step[:6] == ["step", "10.000", "12.000", "+2.000", "+20.0%", "1.200"]
    assert step[-1] == "SLOWER"
    assert "forward +20.0%; one run per side: equal processes differ by 5.0% (std)" in lines[places[-1]]


def _printed(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    capsys.readouterr()
    run(arguments)
    return capsys.readouterr().out


def test_runs_are_named_by_folder_or_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    a = [written_run(tmp_path / "a" / f"version_{i}", scale) for i, scale in enumerate((1.0, 1.02))]
    b = [written_run(tmp_path / "b" / f"version_{i}", scale) for i, scale in enumerate((1.1, 1.12))]
    by_folder = _printed(capsys, [str(tmp_path / "a"), str(tmp_path / "b")])
    assert by_folder == _printed(capsys, ["--a", *a, "--b", *b])
    assert f"A: 2 runs: {a[0]}, {a[1]}" in by_folder
    # Unlike runs are refused unless asked for.
    larger = written_run(tmp_path / "larger", model=MODEL.model_copy(update={"parameters": 2000}))
    with pytest.raises(UsageError, match=r"given parameters 1000 and 2000\n.*--unlike"):
        run([a[0], larger])
    assert run([a[0], larger, "--unlike"]) == 0
    assert "  parameters: 1000 → 2000" in capsys.readouterr().out


def test_wrong_calls_are_refused(pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    a, b = pair
    (tmp_path / "empty").mkdir()
    calls = [
        [],
        [a],
        [a, b, "--a", a],
        [a, str(tmp_path / "nowhere")],
        [a, str(tmp_path / "empty")],
        [a, b, "--fail_on", "faster"],
        [a, b, "--format", "html"],
        [a, b, "--output", str(tmp_path / "no" / "where")],
        [a, a],
    ]
    assert_refused_as_stored("cli/compare", [["compare", *call] for call in calls], capsys, here=tmp_path)
    alone = tmp_path / "alone"
    made_search(alone / "search", made_improve())
    assert_refused_as_stored("cli/refused: a search alone", [["compare", str(alone), str(alone)]], capsys, here=alone)


def test_a_file_gets_what_the_terminal_would(pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for form in ("terminal", "markdown", "json"):
        printed = _printed(capsys, [*pair, "--format", form])
        assert _printed(capsys, [*pair, "--format", form, "--output", str(tmp_path / form)]) == ""
        assert (tmp_path / form).read_text(encoding="utf-8") == printed
    found = json.loads((tmp_path / "json").read_text(encoding="utf-8"))
    assert found["step"]["interval"]["ratio"] == pytest.approx(1.2)
    assert [row["verdict"] for row in found["memory"]] == ["SAME", "UNCLEAR"]


def test_the_spread_found_by_selftest_decides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sides = [written_run(tmp_path / "a"), written_run(tmp_path / "b", 1.1), "--format", "json"]
    assert json.loads(_printed(capsys, sides))["step"]["verdict"] == "UNCLEAR"
    save_spread(ENVIRONMENT, ProcessSpread(std=0.005, freedom=16))
    assert json.loads(_printed(capsys, sides))["step"]["verdict"] == "SLOWER"
    assert json.loads(_printed(capsys, [*sides, "--spread=0.05"]))["step"]["verdict"] == "UNCLEAR"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    assert "5.0% (std), by assumption" in _printed(capsys, list(pair))
    assert "3.0% (std), set with --spread" in _printed(capsys, [*pair, "--spread=0.03"])


def test_exit_codes_follow_the_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sides = [written_run(tmp_path / "a"), written_run(tmp_path / "b", 1.05)]
    assert main(["compare", *sides, "--fail_on", "slower"]) == 0
    assert main(["compare", *sides, "--fail_on", "unclear"]) == 1
    assert main(["compare", *sides, "--fail_on", "unclear", "--spread=0.001"]) == 1  # slower
    assert main(["compare", sides[1], sides[0], "--fail_on", "unclear", "--spread=0.001"]) == 0  # faster
    # With a bound, SAME can be reached, and the verdict names the bound.
    sides = [sides[0], written_run(tmp_path / "c", 1.001), "--spread=0.01"]
    assert "SAME: step time" in _printed(capsys, sides)
    assert "any difference is below" in _printed(capsys, sides)
    assert "UNCLEAR" in _printed(capsys, [*sides, "--same_within=0.01"])
