"""``report`` as a person calls it."""

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from made_improve import made_improve, made_search, nothing_helped
from made_parts import made_kernel, made_kernels, made_phase
from made_timeline import made_timeline
from page_reader import Page
from refused import assert_refused_as_stored
from stored_texts import assert_stored
from tabled import write_run_of, write_sweep

from lm_profiler.cli.main import main
from lm_profiler.record.kernels import kernels_file
from lm_profiler.record.memory_timeline import timeline_file, write_timeline

FAST, SLOW = [(0.010, 0.020)] * 6, [(0.020, 0.050)] * 6


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A run, and a sweep of two precisions twice, of which one ran out of memory and one was never tried."""
    logs = tmp_path / "logs"
    write_run_of(logs / "alone" / "version_0", SLOW, name="alone", size="medium")
    sweep = logs / "sweep"
    cells = []
    for at, precision in enumerate(("32-true", "bf16-mixed", "32-true", "bf16-mixed")):
        options = {"precision": precision, "failed": ("oom", "no memory left") if at == 1 else ("ok", None)}
        run = write_run_of(sweep / f"cell{at}" / "version_0", [] if at == 1 else FAST, **options) if at < 3 else None
        status = "missing" if at == 3 else "oom" if at == 1 else "ok"
        cells.append(({"trainer.precision": precision}, at // 2, status, run))
    write_sweep(sweep, cells)
    return logs


def held(page: Path) -> list[Any]:
    """All that the page's views are drawn from."""
    return list(Page(page).answers.values())


def report(*arguments: object) -> int:
    return main(["report", *map(str, arguments)])


def test_runs_and_sweeps_share_a_table(logs: Path, capsys: pytest.CaptureFixture[str]):
    assert report(logs) == 0
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines()]
    assert ["alone", "medium", "32-true", "70.00", "[69.95,", "70.05]", "20.00", "50.00", "ok", "1"] in rows
    assert ["cell0,", "cell2", "small", "32-true", "30.00", "[30.00,", "30.00]", "10.00", "20.00", "ok", "2"] in rows
    assert ["cell1,", "cell3", "small", "bf16-mixed", "1", "OOM,", "1", "not", "run", "0"] in rows
    assert err == ""
    assert report(logs / "alone", "--columns", "name,status", logs / "sweep" / "cell0", "--format", "csv") == 0
    assert capsys.readouterr().out == "name,status\nalone,ok\ncell0,ok\n"


def test_runs_are_selected_by_their_facts(logs: Path, capsys: pytest.CaptureFixture[str]):
    def folders(*conditions: str) -> list[str]:
        assert report(logs, "--where", ",".join(conditions), *["--format", "csv", "--group_by", "folder"]) == 0
        rows = csv.DictReader(capsys.readouterr().out.splitlines())
        return [Path(row["folder"]).relative_to(logs).parts[-2 if "version" in row["folder"] else -1] for row in rows]

    assert folders("size=medium") == ["alone"]
    assert folders("size=small", "size=medium", "precision!=bf16-mixed") == ["alone", "cell0", "cell2"]
    assert folders("verb=fit", "trainer.precision=bf16-mixed") == ["cell1", "cell3"]
    assert report(logs, "--group_by", "size", "--format", "csv") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["size"], round(float(row["step_s"]), 9), row["n"]) for row in rows] == [
        ("small", 0.03, "2"),
        ("medium", 0.07, "1"),
    ]
    assert report(logs, "--pivot", "size", "precision", "--value", "forward_s", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)[0]["bf16-mixed_status"] == "oom"


@pytest.mark.parametrize("name", ["t.txt", "t.md", "t.csv", "t.json", "t.tex", "t.typ", "t.parquet"])
def test_the_suffix_decides_the_format(logs: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]):
    begins = {
        ".txt": b"in all rows",
        ".md": b"- in all rows",
        ".csv": b"name,folder",
        ".json": b"[\n {",
        ".tex": b"% in",
        ".typ": b"// in",
    }
    assert report(logs, "--output", tmp_path / name) == 0
    assert (tmp_path / name).read_bytes().startswith(begins.get(Path(name).suffix, b"PAR1"))
    assert capsys.readouterr().out == ""


def test_columns_are_listed_by_subject(logs: Path, capsys: pytest.CaptureFixture[str]):
    assert report("--columns", "help") == 0
    blocks = [block.splitlines() for block in capsys.readouterr().out.split("\n\n")]
    groups = {title: [line.split()[0] for line in lines] for title, _, *lines in blocks}
    assert "forward_s" in groups["Time of a step"]
    assert {"PART_median_s", "PART_p5_s", "PART_cv"} <= {*groups["Spread of the steps"]}
    assert {"energy_per_token_j", "throttle_reasons"} <= {*groups["GPU"]}
    named = [name for group in groups.values() for name in group if name.endswith(("_s", "_cv", "_j", "_bytes"))]
    names = [name.replace("PART", "backward").replace("MOMENT", "set_up") for name in named]
    assert report(logs, "--columns", ",".join(names), "--format", "csv") == 0
    header = next(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert [name for name in header if not name.endswith(("_low", "_high"))] == [*names, "n"]


def test_spreads_are_columns_and_in_files_for_programs(logs: Path, capsys: pytest.CaptureFixture[str]):
    names = "forward_median_s,step_cv,backward_over_forward"
    assert report(logs / "alone", "--columns", names, "--format", "markdown") == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert [cell.strip() for cell in line.split("|")[1:-1]] == ["20.00", "0.0", "2.50"]
    assert report(logs / "alone", "--format", "csv") == 0
    [row] = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert float(row["forward_backward_s"]) == pytest.approx(0.07)
    assert float(row["step_std_s"]) == pytest.approx(0, abs=1e-9)
    assert float(row["backward_over_forward"]) == pytest.approx(2.5)


def test_damage_is_a_warning(logs: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    damaged = logs / "alone" / "version_0" / "steps.csv"
    damaged.write_bytes(b"\xff")
    assert report(logs, "--warmup", 0, 1) == 0
    out, err = capsys.readouterr()
    assert str(damaged) in err
    assert "alone" not in out
    assert report(logs / "alone", "--warmup", 0) == 1
    # A picture without a run's steps is reported.
    assert report(logs, "--output", tmp_path / "page.html") == 0
    assert str(damaged) in capsys.readouterr().err
    assert str(damaged) in json.dumps(held(tmp_path / "page.html"))


def test_damaged_folders_are_warnings(logs: Path, capsys: pytest.CaptureFixture[str]):
    damaged = logs / "alone" / "version_0" / "run.json"
    damaged.write_text("{")
    assert report(logs) == 0
    err = capsys.readouterr().err
    assert str(damaged) in err
    assert report(logs / "alone") == 1


@pytest.mark.parametrize("layout", [[], ["--layout", "warmups"], ["--layout", "wide"]])
def test_a_run_of_too_few_steps_is_left_out(layout: list[str], logs: Path, capsys: pytest.CaptureFixture[str]):
    alone = logs / "alone" / "version_0"  # six steps
    assert report(logs / "alone", *layout, "--warmup", 0, 99, "--format", "csv") == 0
    out, err = capsys.readouterr()
    assert {row["warmup_steps"] for row in csv.DictReader(out.splitlines())} == {"0"}
    late = err
    assert report(logs / "alone", *layout, "--warmup", 0, 1, "--steps", 6, "--format", "csv") == 0
    out, err = capsys.readouterr()
    assert {row["warmup_steps"] for row in csv.DictReader(out.splitlines())} == {"0"}
    assert_stored("cli/report_problems: too few steps", {"--warmup 0 99": late, "--warmup 1 --steps 6": err}, run=alone)
    assert report(logs / "alone", *layout, "--warmup", 99) == 1
    out, err = capsys.readouterr()
    assert out == ""


REFUSED = [
    ["report"],
    ["report", *["nowhere"]],
    ["report", *["{logs}", "--formt", "csv"]],
    ["report", *["{logs}", "--form", "csv"]],
    ["report", *["{logs}", "--format", "xml"]],
    ["report", *["{logs}", "--columns", "stepp_s"]],
    ["report", *["{logs}", "--output", "table.xml"]],
    ["report", *["{logs}", "--output", "{logs}/nowhere/t.csv"]],
    ["report", *["{logs}", "--format", "parquet"]],
    ["report", *["{logs}", "--pivot", "size", "step_s"]],
    ["report", *["{logs}", "--plot", "mfu", "--output", "a.svg", "--format", "csv"]],
    ["report", *["{logs}", "--warmup", "-1"]],
    ["report", *["{logs}", "--steps", "0"]],
    ["report", *["--warmup", "0", "{logs}"]],
    ["report", *["{logs}", "--kernels", "--warmup", "0"]],
    ["report", *["{logs}", "--pivot", "size", "device", "--columns", "name"]],
    ["report", *["{logs}", "--pivot", "size"]],
    ["report", *["{logs}", "--value", "mfu"]],
    ["report", *["{logs}", "--plot", "phases"]],
    ["report", *["{logs}", "--plot", "phases", "--log", "--output", "a.svg"]],
    ["report", *["{logs}", "--plot", "line", "--value", "size", "--output", "a.svg"]],
    ["report", *["{logs}", "--relative", "attention=flash"]],
    ["report", *["{logs}", "--relative", "size=small", "--kernels"]],
    ["report", "trace.json.gz", "--kernels"],
    ["report", *["{logs}", "--where", "verb=predict"]],
    ["report", *["{logs}", "--where", "verb"]],
    ["report", *["{logs}", "--where", "verbs=fit"]],
    ["report", *["{logs}", "--where", "step_s=1"]],
]


def test_wrong_calls(logs: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = [[word.format(logs=logs) for word in call] for call in REFUSED]
    assert_refused_as_stored("cli/report", calls, capsys, logs=logs)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert report(logs, "--output", tmp_path / "t.parquet") == 2
    assert "lm_profiler[parquet]" in capsys.readouterr().err
    assert not (tmp_path / "t.parquet").exists()


def test_a_search_is_reported_instead_of_its_runs(logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    search = logs / "search"
    made_search(search, made_improve())
    write_run_of(search / "first,r0" / "version_0", FAST, name="first,r0")
    assert report(logs) == 0
    out = capsys.readouterr().out
    assert out.index("alone") < out.index("improve: small_improve") < out.index("1.73 × [1.69, 1.77]")
    assert "first,r0" not in out
    assert report(search, "--columns", "name,step_s") == 0
    assert "first,r0" in capsys.readouterr().out
    assert report(search, "--output", tmp_path / "page.html") == 0
    assert "4 pairs" in json.dumps(held(tmp_path / "page.html"))
    made_search(logs / "search", nothing_helped())
    (logs / "search" / "improve.json").write_text("{}")
    assert report(logs) == 0
    assert_stored("cli/report_problems: no way", {"an empty record": capsys.readouterr().err}, logs=logs)


def test_kernels_are_printed_or_written(logs: Path, capsys: pytest.CaptureFixture[str]):
    traced = logs / "alone" / "version_0"
    table = made_kernels([made_kernel("mm", 8, 0.6)], {"forward": made_phase(0.6, 0.4, matmul=(8, 0.6))}, 1.0)
    (traced / "trace").mkdir()
    table.write(kernels_file(traced / "trace" / "rank0.pt.trace.json.gz"))
    assert report(logs / "alone", "--kernels") == 0
    out = capsys.readouterr().out
    assert "300.000" in out  # milliseconds of one of the two steps
    assert_stored("cli/report_kernels", {"alone": out}, logs=logs)
    assert report(logs / "alone", "--kernels", "--format", "typst") == 0
    assert capsys.readouterr().out.count("#table(") == 2  # the answers below are comments, and no empty table
    assert report(logs, "--kernels", "--format", "csv") == 0
    out, err = capsys.readouterr()
    [found] = csv.DictReader(io.StringIO(out))
    assert (found["folder"], found["name"], found["calls"], found["time_s"]) == (str(traced), "mm", "4.0", "0.3")
    assert str(logs / "sweep" / "cell0" / "version_0") in err
    assert report(logs / "sweep", "--kernels") == 1


def test_memory_timelines_are_drawn(logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, without = logs / "alone" / "version_0", logs / "sweep" / "cell0" / "version_0"
    for source in ("planned", "measured"):
        write_timeline(made_timeline(source=source), one)
    drawn = tmp_path / "memory.svg"
    assert report(one, without, "--plot", "memory_timeline", "--output", drawn) == 0
    assert drawn.read_text().count("peak 0.68 KiB") == 2
    assert str(without) in capsys.readouterr().err
    assert report(one, "--allocations", "--format", "json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {(row["source"], row["which"], row["bytes"]) for row in rows} == {
        (source, which, size)
        for source in ("planned", "measured")
        for which, size in (("at_peak", 300), ("saved", 200))
    }
    assert report(one, "--allocations", "--format", "latex") == 0
    assert r"\toprule" in capsys.readouterr().out
    assert report(one, "--allocations") == 0
    assert "mm, head, model.py:7" in capsys.readouterr().out
    assert report(without, "--plot", "memory_timeline", "--output", drawn) == 2
    timeline_file(one, "planned").write_text("{")
    assert report(one, "--allocations") == 1
    assert "memory_timeline.planned.json" in capsys.readouterr().err
