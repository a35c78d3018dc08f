"""What CI services read: each format is read back, and its figures are those of the runs."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from compared import rows_near_10_ms, write_run

from lm_profiler.cli.main import main


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    """Two runs, of which B takes half as long again."""
    return str(write_run(tmp_path / "before", rows_near_10_ms())), str(
        write_run(tmp_path / "after", rows_near_10_ms(1.5))
    )


def written(verb: str, kind: str, runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main([verb, *runs, "--format", kind]) == 0
    return capsys.readouterr().out


def test_junit_fails_if_b_is_slower(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]):
    suite = ElementTree.fromstring(written("compare", "junit", pair, capsys).encode())
    failed = {case.get("name"): case[0].get("message") for case in suite if len(case)}
    assert all("50.0%" in (failed[name] or "") for name in ("step", "forward"))  # what failed, and by how much
    assert (failed["forward"] or "").startswith("SLOWER: forward 10.000 ms in A, 15.000 ms in B, +50.0%")
    assert int(suite.get("tests", 0)) == len(suite)
    assert int(suite.get("failures", 0)) == len(failed)
    suite = ElementTree.fromstring(written("report", "junit", pair, capsys).encode())
    assert {case.get("classname") for case in suite} == set(pair)


@pytest.fixture
def github(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    files = {name: tmp_path / name.lower() for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
    for name, file in files.items():
        monkeypatch.setenv(name, str(file))
    return files


def test_github_gets_its_files(pair: tuple[str, str], github: dict[str, Path], capsys: pytest.CaptureFixture[str]):
    github["GITHUB_STEP_SUMMARY"].write_text("of an earlier step\n", encoding="utf-8")
    assert main(["compare", *pair]) == 0
    outputs = dict(line.split("=") for line in github["GITHUB_OUTPUT"].read_text(encoding="utf-8").splitlines())
    assert outputs["verdict"] == "SLOWER"
    assert float(outputs["low"]) < 1.5 < float(outputs["high"])
    assert float(outputs["ratio"]) == pytest.approx(1.5)
    summary = github["GITHUB_STEP_SUMMARY"].read_text(encoding="utf-8")
    assert summary.startswith("of an earlier step\n")
    assert "SLOWER" in summary
    assert summary.count("```") % 2 == 0
    annotation = [line for line in capsys.readouterr().out.splitlines() if line.startswith("::")]
    assert len(annotation) == 1
    assert annotation[0].startswith("::warning ")
    assert main(["compare", *pair, "--fail_on=slower"]) == 1
    assert "::error " in capsys.readouterr().out  # an error where the job fails for it


def test_report_adds_to_the_summary(pair: tuple[str, str], github: dict[str, Path], capsys: pytest.CaptureFixture[str]):
    assert main(["report", *pair, "--format=json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
    summary = github["GITHUB_STEP_SUMMARY"].read_text(encoding="utf-8")
    table_lines = [line for line in summary.splitlines() if line.startswith("|")]
    assert table_lines[0].startswith("| folder ")
    assert len(table_lines) == 4
    assert main(["report", *pair, "--github=false"]) == 0
    assert github["GITHUB_STEP_SUMMARY"].read_text(encoding="utf-8") == summary


def test_a_summary_fits_a_comment(github: dict[str, Path], tmp_path: Path) -> None:
    many: dict[str, Any] = {f"option_{n}": "x" * 100 for n in range(900)}
    a, b = (write_run(tmp_path / name, rows_near_10_ms(), config=config) for name, config in (("a", {}), ("b", many)))
    assert main(["compare", str(a), str(b)]) == 0
    assert len(github["GITHUB_STEP_SUMMARY"].read_bytes()) <= 64_000
    github["GITHUB_STEP_SUMMARY"].unlink()
    for n in range(400):
        write_run(tmp_path / f"a run whose name is long {'x' * 80} {n}", rows_near_10_ms())
    assert main(["report", str(tmp_path)]) == 0
    summary = github["GITHUB_STEP_SUMMARY"].read_text(encoding="utf-8")
    assert len(summary.encode()) <= 64_000
    assert summary.endswith("|\n\n(cut: too long)\n")


def test_github_files_can_be_off(pair: tuple[str, str], github: dict[str, Path], capsys: pytest.CaptureFixture[str]):
    assert main(["compare", *pair, "--github=false"]) == 0
    assert not github["GITHUB_STEP_SUMMARY"].exists()
    capsys.readouterr()
    assert main(["compare", *pair, "--format=json"]) == 0
    read = capsys.readouterr()
    assert json.loads(read.out)["step"]["verdict"] == "SLOWER"
    assert read.err.startswith("::warning ")


def test_an_unwritable_summary_is_reported(
    pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GITHUB_OUTPUT", raising=False)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "no" / "folder"))
    assert main(["compare", *pair, "--fail_on=slower"]) == 1  # the exit code does not depend on the summary
    assert main(["compare", *pair]) == 0
    assert "cannot be written" in capsys.readouterr().err
