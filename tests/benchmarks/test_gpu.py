"""The command that is to run on a GPU works: its parts run here, tiny, with a made-up device for the clock."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.registry import PARTS, chosen

pytestmark = pytest.mark.timeout(600)  # many processes, on a machine that others may use too
ROOT = Path(__file__).resolve().parents[2]


def command(*options: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "benchmarks.gpu", *options]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All parts, with tiny sizes."""
    folder = tmp_path_factory.mktemp("gpu")
    done = command("--on_cpu", f"--output={folder}")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def parts(results: Path) -> dict[str, dict[str, Any]]:
    told = json.loads((results / "gpu.json").read_text())
    return {part["name"]: part for part in told["parts"]}


def test_every_part_runs(parts: dict[str, dict[str, Any]]) -> None:
    assert {name: part["how"] for name, part in parts.items()} == {part.name: None for part in PARTS}


def test_on_a_device_of_its_own_clock_every_phase_is_right(parts: dict[str, dict[str, Any]]) -> None:
    assert parts["known_answers"]["figures"]["worst_of_allowed"] < 0.01


def test_the_page_names_the_machine_and_says_that_these_figures_are_none(results: Path) -> None:
    text = (results / "README.md").read_text()
    assert "to try the command: these figures say nothing" in text
    assert all(f"## {part.number}. {part.name}" in text for part in PARTS)


def test_what_is_done_is_not_done_again(results: Path) -> None:
    before = (results / "gpu.json").read_bytes()
    done = command("--on_cpu", f"--output={results}")
    assert (done.returncode, done.stdout.count("\n")) == (0, 1)
    assert (results / "gpu.json").read_bytes() == before


def test_a_dry_run_lists_the_parts_and_their_limits() -> None:
    done = command("--dry_run", "--time_limit=7")
    assert done.returncode == 0
    lines = done.stdout.splitlines()[2:]
    assert [line.split("|")[2].strip() for line in lines] == [part.name for part in PARTS]
    assert all(line.split("|")[4].strip() == "7" for line in lines)


def test_all_parts_together_end_within_eight_minutes() -> None:
    assert sum(part.limit_s for part in PARTS) <= 480


def test_parts_are_chosen_by_number_or_name_and_the_machine_is_always_told() -> None:
    assert [part.name for part in chosen(["5", "tests"])] == ["machine", "tests", "mfu"]
    assert chosen([]) == list(PARTS)
    with pytest.raises(ValueError, match=r"parts: expected some of .*, given '99'"):
        chosen(["99"])
