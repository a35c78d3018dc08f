"""Files of every version, as that version wrote them: whatever reads runs reads them, and shows their content.

What stands in them is taken from them here with nothing but ``json`` and ``csv``.
"""

import csv
import json
import re
import shlex
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import warm
from served import get_from
from stored_texts import assert_stored

from lm_profiler.cli.main import main

pytestmark = pytest.mark.usefixtures("no_preflight")


HERE = Path(__file__).parent
VERSIONS = sorted(path.name for path in HERE.iterdir() if path.is_dir() and path.name[0].isdecimal())
RUNS = sorted(path.parent.relative_to(HERE).as_posix() for path in HERE.glob("*/**/run.json"))


def plain(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


# Steps of the run in this folder fall from 156 to 2 ms. The versions that stored runs did not see that as warm-up.
LEFT_OUT_NOW = {("0.1", "context_length=8"): 6}


def measured(run: Path, anew: bool = False) -> list[dict[str, str]]:
    """The rows of the steps that figures are of: measured, and not cut off as warm-up that was left over.

    ``anew``: as the present version judges them.
    """
    lines = (run / "steps.csv").read_text(encoding="utf-8").splitlines()
    rows = [row for row in csv.DictReader(lines) if row["stage"] == "measure"]
    is_judged_otherwise = {"0.1", "0.2"} & {folder.name for folder in run.parents}
    if anew and is_judged_otherwise:
        return rows[LEFT_OUT_NOW.get((run.parents[2].name, run.parent.name), 0) :]
    steadiness = plain(run / "run.json")["steadiness"] or {"cut": 0}
    return rows[steadiness["cut"] :]


def mean_s(run: Path, column: str = "step_s", anew: bool = False) -> float:
    return statistics.fmean(float(row[column]) for row in measured(run, anew))


def same(folder: Path) -> Path:
    return folder


def of_a_later_version(folder: Path) -> Path:
    """The files as a version may leave them that adds what the rule lets it add."""
    for path in folder.rglob("*.json"):
        path.write_text(json.dumps(with_more(plain(path)), indent=1))
    for path in folder.rglob("steps.csv"):
        step, rest = zip(*(line.split(",", 1) for line in path.read_text().splitlines()), strict=True)
        new = ["left_s", *["0.25"] * (len(step) - 1)]
        path.write_text("".join(f"{a},{b},{c},\n" for a, b, c in zip(step, new, rest, strict=True)))
    return folder


def with_more(value: Any, key: str = "") -> Any:
    """An unknown field in every object that has fixed ones; in others another key, with what the first has."""
    if isinstance(value, list):
        return [with_more(item) for item in value]
    if not isinstance(value, dict) or key in OPEN:
        return value
    more = {name: with_more(below, name) for name, below in value.items()}
    later = next(iter(more.values()), None) if key in BY_NAME else {"value": 1}
    return more if later is None else {**more, "added_later": later}


OPEN = ("config", "configs", "options", "overrides", "versions", "flags")
BY_NAME = (
    *("time", "host_time", "shares", "steps", "steps_planned", "parts", "causes", "phases", "kinds"),
    *("facts", "flops", "moments", "step_phases", "thread_use"),
)
"""Objects whose keys are a user's own; whose keys are parts of a step, stages, phases, moments and kinds of kernels."""


@pytest.fixture(params=[same, of_a_later_version])
def stored(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of all versions' files, the current folder."""
    change: Callable[[Path], Path] = request.param
    for version in VERSIONS:
        shutil.copytree(HERE / version, tmp_path / version)
    monkeypatch.chdir(tmp_path)
    return change(tmp_path)


def test_there_are_files_of_each_version() -> None:
    assert VERSIONS[:2] == ["0.1", "0.2"]
    assert {"0.1/tiny/version_0", "0.1/fails/version_0", "0.1/two/context_length=8/version_0"} <= set(RUNS)
    assert "0.2/killed/version_0" in RUNS


@pytest.mark.parametrize("version", VERSIONS)
def test_report_prints_the_stored_figures(stored: Path, version: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", version, "--format=json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    rows = {row["folder"]: row for row in json.loads(out)}
    assert sorted(rows) == [run for run in RUNS if run.startswith(version)]
    for run, row in rows.items():
        record = plain(stored / run / "run.json")
        assert (row["status"], row["verb"]) == (record["status"], record["verb"])
        for column in ("step_s", "forward_s", "backward_s", "optimizer_s"):
            assert row[column] == pytest.approx(mean_s(stored / run, column), abs=1e-9)
        if record["memory"]:
            assert row["resident_peak_bytes"] == record["memory"]["measured"]["resident_peak"]
        if record["throughput"] and record["throughput"]["tokens_per_s"]:
            tokens = int(measured(stored / run)[0]["tokens"])
            typical_s = mean_s(stored / run)
            if version in ("0.1", "0.2"):  # which took the median
                typical_s = statistics.median(float(row["step_s"]) for row in measured(stored / run))
            share = 1.0
            if row.get("tokens_per_s_bound") == "at least":  # on a busy machine what passed between steps counts
                steps_s = record["time"]["step"]["n"] * record["time"]["step"]["mean"]
                share = steps_s / (steps_s + record["between_steps_s"])
            assert row["tokens_per_s"] == pytest.approx(share * tokens / typical_s, rel=1e-6)
    failed = rows[f"{version}/fails/version_0"]
    assert failed["reason"].startswith("ValueError:")


@pytest.mark.parametrize("run", RUNS)
def test_one_run_is_printed(stored: Path, run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", run]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    numbers = [float(number) for number in re.findall(r"\d+\.\d+", out)]
    assert any(number == pytest.approx(1e3 * mean_s(stored / run, "backward_s"), rel=0.005) for number in numbers)


@pytest.mark.parametrize("version", VERSIONS)
def test_kernels_are_printed(stored: Path, version: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = plain(stored / version / "tiny/version_0/trace/rank0.kernels.json")
    assert main(["report", f"{version}/tiny", "--kernels", "--format=json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == len(table["rows"])
    mm_s = table["steps"] * sum(row["time_s"] for row in rows if row["name"] == "aten::mm")
    known = sum(row["total_s"] for row in table["rows"] if row["name"] == "aten::mm")
    assert mm_s == pytest.approx(known)
    assert known > 0


@pytest.mark.parametrize("version", VERSIONS)
def test_compare_takes_them(stored: Path, version: str, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (f"{version}/two/context_length={length}" for length in (8, 16))
    assert main(["compare", a, b, "--unlike", "--format=json"]) == 0
    out, err = capsys.readouterr()
    step = json.loads(out)["step"]
    expected = [mean_s(stored / side / "version_0", anew=True) for side in (a, b)]
    assert [step["a_s"], step["b_s"]] == pytest.approx(expected, abs=1e-9)
    if step["interval"] is not None:  # none where a run never settled
        assert step["interval"]["ratio"] == pytest.approx(expected[1] / expected[0], rel=1e-6)
    assert err == ""


def test_versions_are_compared_with_each_other(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (f"{version}/tiny/version_0" for version in (VERSIONS[0], VERSIONS[-1]))
    assert main(["compare", a, b, "--format=json"]) == 0
    step = json.loads(capsys.readouterr().out)["step"]
    assert [step["a_s"], step["b_s"]] == pytest.approx([mean_s(stored / run, anew=True) for run in (a, b)], abs=1e-9)


def test_the_tab_answers_of_them(stored: Path) -> None:
    get = get_from(str(stored))
    listing = get("runs").json
    assert listing["problems"] == []
    assert sorted(run["run"] for run in listing["runs"]) == RUNS
    for run in listing["runs"]:
        assert run["values"]["step_s"] == pytest.approx(mean_s(stored / run["run"]), abs=1e-9)
        assert get("run", run=run["run"]).status_code == 200
    for version in VERSIONS:
        assert get("kernels", run=f"{version}/tiny/version_0").status_code == 200
    sides = [f"{VERSIONS[0]}/tiny/version_0", f"{VERSIONS[-1]}/tiny/version_0"]
    assert get("compare", a=sides[0], b=sides[1]).status_code == 200


@pytest.mark.parametrize("stored", [of_a_later_version], indirect=True)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_sweep_is_gone_on_with(stored: Path, version: str, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(HERE / "tiny.yaml", stored)
    shutil.copytree(stored / version / "two", stored / "logs" / "two")
    cells = [stored / "logs/two" / f"context_length={length}" for length in (8, 16)]
    before = [(cell / "version_0/run.json").stat().st_mtime_ns for cell in cells]
    call = shlex.split(plain(stored / "logs/two/sweep.json")["command"])
    assert main(call[call.index("sweep") :]) == 0
    assert "2 cells: 2 ok" in capsys.readouterr().out
    assert [(cell / "version_0/run.json").stat().st_mtime_ns for cell in cells] == before
    (cells[0] / "outcome.json").unlink()  # nobody was left to judge it; how its process ended is known
    done = warm.run_python("-m", "lm_profiler", *call[call.index("sweep") :])  # it starts what runs the cell
    assert done.returncode == 0, done.stderr
    assert "2 cells: 2 ok" in done.stdout
    assert plain(cells[0] / "outcome.json")["status"] == "ok"


WORDS = {
    "run.json": ["status", "verb", "steadiness.word", "verdict.bound_by"],
    "trace/rank0.kernels.json": ["source", "rows.0.kind"],
}


@pytest.mark.parametrize("stored", [same], indirect=True)
@pytest.mark.parametrize("file, where", [(file, where) for file, words in WORDS.items() for where in words])
def test_a_word_of_a_later_version_is_shown(stored: Path, file: str, where: str, capsys: pytest.CaptureFixture[str]):
    run = stored / VERSIONS[-1] / "tiny/version_0"
    content = plain(run / file)
    *path, last = [int(key) if key.isdecimal() else key for key in where.split(".")]
    part = content
    for key in path:
        part = part[key]
    part[last] = "melted"
    (run / file).write_text(json.dumps(content))
    for options in (["--format=html", "--output=x.html"], ["--kernels"], ["--columns=status,verb,steadiness,bound_by"]):
        assert main(["report", str(run), *options]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert where == "source" or "melted" in out
    get = get_from(str(stored))
    assert get("run", run=f"{VERSIONS[-1]}/tiny/version_0").status_code == 200
    assert get("kernels", run=f"{VERSIONS[-1]}/tiny/version_0").status_code == 200
    assert get("runs").json["problems"] == []


def test_files_of_a_later_format_are_reported(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, sweep = stored / "0.2/tiny/version_0", stored / "0.2/two"
    for path in (run / "run.json", sweep / "sweep.json"):
        path.write_text(json.dumps({**plain(path), "schema_version": 2, "name": {"first": "all", "last": "else"}}))
    assert main(["report", "0.2"]) == 0
    _, err = capsys.readouterr()
    assert_stored("record/problems: of a later version", {"a run and a sweep": err})
    assert "Traceback" not in err
