"""Cells as jobs, with submitit's own executors for machines without a cluster."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from told import Told

from lm_profiler.cli.verbs.sweep import SPAWNING
from lm_profiler.record.calls import MissingExtra
from lm_profiler.record.sweep import Cell, CellOutcome, read_outcomes
from lm_profiler.sweep.cluster import Jobs, run_job
from lm_profiler.sweep.schedule import Ended, record_outcome
from lm_profiler.sweep.sweep_plan import SweepRequest
from lm_profiler.usage_error import UsageError


def cell(name: str, *arguments: str) -> Cell:
    return Cell(id=name, overrides={}, repeat=0, arguments=list(arguments))


QUICK = cell("quick", "fit", "--config=nowhere.yaml")
"""It fails before it has loaded torch."""


def jobs(folder: Path, cells: list[Cell], launcher: str = "local", **options: Any) -> tuple[Jobs, Told]:
    told = Told()
    request = SweepRequest(name="s", repeats=2, launcher=launcher, timeout_s=60.0, **options)
    return Jobs(folder, cells, SPAWNING, told, request, lambda seconds: None), told


def test_a_job_writes_what_became_of_its_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = [QUICK, cell("also", "predict", "--config=elsewhere.yaml")]
    work, told = jobs(tmp_path, cells)
    work.run()
    assert sorted(told.heard) == ["+also", "+quick", "-also failed", "-quick failed"]
    outcomes = read_outcomes(tmp_path)
    reason = "exit code 2: config: expected a YAML file of options, given nowhere.yaml (No such file or directory)"
    assert outcomes["quick"].reason == reason
    assert "elsewhere.yaml" in (tmp_path / "also" / "output.txt").read_text()


def test_a_job_whose_cell_is_done_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "submitit").mkdir()
    (tmp_path / QUICK.id).mkdir()
    before = record_outcome(tmp_path, QUICK, Ended(1, 1.0))
    run_job(tmp_path, QUICK, ("no such program",), 60.0)
    assert read_outcomes(tmp_path) == {"quick": before}


class Job:
    """A job that has ended without a word of its own."""

    def __init__(self, state: str, said: str | None = None) -> None:
        self.state, self._said = state, said

    def done(self) -> bool:
        return True

    def stderr(self) -> str | None:
        return self._said


@pytest.mark.parametrize(
    "job,status,reason",
    [
        (Job("OUT_OF_MEMORY"), "oom", "killed by the OOM killer; left no record"),
        (Job("TIMEOUT"), "timeout", "ran longer than 60 s; left no record"),
        (Job("CANCELLED by 1"), "interrupted", "its job ended as CANCELLED by 1"),
        (Job("FAILED", "Traceback\nError: no torch\n"), "interrupted", "its job ended as FAILED: Error: no torch"),
    ],
    ids=lambda value: value.state if isinstance(value, Job) else "",
)  # fmt: skip
def test_of_a_job_that_did_not_live_to_tell_the_cluster_does(
    job: Job, status: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, told = jobs(tmp_path, [QUICK])
    monkeypatch.setattr(work._executor, "submit", lambda *_: job)
    monkeypatch.setattr(work._executor, "batch", nullcontext)
    work.run()
    outcome: CellOutcome = read_outcomes(tmp_path)["quick"]
    assert (outcome.status, outcome.reason) == (status, reason)
    assert told.heard == ["+quick", f"-quick {status}"]


def test_an_option_that_the_cluster_does_not_have_is_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^launcher: Unknown argument 'partitoin' for executor 'slurm' in parameter "):
        jobs(tmp_path, [], "local", slurm={"partitoin": "x"})


def test_a_machine_without_the_cluster_is_told_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"^launcher: .*srun"):
        jobs(tmp_path, [], "slurm")


def test_without_submitit_the_message_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(MissingExtra, match=r"^launcher: expected submitit, .+; pip install 'lm_profiler\[slurm\]'$"):
        jobs(tmp_path, [])
