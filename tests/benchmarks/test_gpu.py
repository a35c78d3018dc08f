"""The command that is to run on a GPU works: its parts run here, tiny, with a made-up device for the clock."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
import warm
from benchmarks.gpu.card import watched
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.parts import machine, overhead, tests
from benchmarks.gpu.place import Place
from benchmarks.gpu.registry import MACHINE, PARTS, chosen
from benchmarks.gpu.runner import run_parts
from raised import refusal
from stored_texts import assert_stored

from lm_profiler.processes.cell_processes import CellProcesses
from lm_profiler.usage_error import UsageError

ROOT = Path(__file__).resolve().parents[2]


def command(*options: str) -> subprocess.CompletedProcess[str]:
    """In a fork of what has loaded torch, as are its parts and their sweeps."""
    return warm.run_python("-m", "benchmarks.gpu", *options, folder=ROOT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(scope="module")
def killed(folder: Path) -> dict[str, Any]:
    """The first part, which had no time; from a server that has loaded nothing for it."""
    with mock.patch("benchmarks.gpu.runner.MODULES", ()):
        assert not run_parts([part for part in PARTS if part.name == "tests"], folder, on_cpu=True, limit_s=0.01)
    return dict(json.loads((folder / "gpu.json").read_text())["parts"][-1])


@pytest.fixture(scope="module")
def results(folder: Path, killed: dict[str, Any]) -> Path:
    """All parts, with tiny sizes: it goes on where the first try has ended."""
    done = command("--on_cpu", f"--output={folder}")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def parts(results: Path) -> dict[str, dict[str, Any]]:
    written = json.loads((results / "gpu.json").read_text())
    return {part["name"]: part for part in written["parts"]}


def test_a_part_is_killed_when_its_time_is_over(killed: dict[str, Any]) -> None:
    assert (killed["name"], killed["status"]) == ("tests", "not done")
    assert "0.01 s" in killed["how"]


def test_results_of_a_part_are_kept_when_the_command_ends(tmp_path: Path) -> None:
    class Ended(CellProcesses):
        """Its part never ends; whoever waits for it is interrupted."""

        def __init__(self) -> None:
            """No process."""

        def start(self, cell: str, arguments: Sequence[str], *_: object) -> None:
            Findings(Path(arguments[1])).add(found=1)

        def wait_for_ends(self, timeout_s: float | None) -> NoReturn:
            raise KeyboardInterrupt

        def __enter__(self) -> Ended:
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing runs."""

    with mock.patch("benchmarks.gpu.runner.CellProcesses", return_value=Ended()), pytest.raises(KeyboardInterrupt):
        run_parts([MACHINE], tmp_path, on_cpu=True, limit_s=None)
    (part,) = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert (part["status"], part["how"], part["figures"]) == ("not done", "interrupted", {"found": 1})


def test_every_part_runs(parts: dict[str, dict[str, Any]]) -> None:
    assert {name: part["how"] for name, part in parts.items()} == {part.name: None for part in PARTS}


def test_on_a_device_of_its_own_clock_every_phase_is_right(parts: dict[str, dict[str, Any]]) -> None:
    assert parts["known_answers"]["figures"]["worst_of_allowed"] < 0.01


def test_the_page_names_the_machine(results: Path) -> None:
    text = (results / "README.md").read_text()
    assert "say nothing" in text
    assert all(f"## {part.number}. {part.name}" in text for part in PARTS)


def test_facts_of_the_machine_are_kept(results: Path) -> None:
    text = (results / "00-machine" / "about.txt").read_text()
    assert all(line in text for line in ("$ nvidia-smi -q\n", f"\ntorch=={version('torch')}"))


def test_use_of_each_gpu_is_written_while_parts_run(tmp_path: Path) -> None:
    class Nvml:
        """Two cards, one of which reports only its memory."""

        nvmlDeviceGetCount = staticmethod(lambda: 2)
        nvmlDeviceGetHandleByIndex = staticmethod(int)
        nvmlDeviceGetMemoryInfo = staticmethod(lambda card: mock.Mock(used=100 + card))

        @staticmethod
        def nvmlDeviceGetPowerUsage(card: int) -> int:
            return 350_000 // (1 - card)

    with mock.patch("benchmarks.gpu.card.initialized", return_value=Nvml()), watched(tmp_path):
        pass
    head, *lines = (tmp_path / "cards.csv").read_text().splitlines()
    rows = [dict(zip(head.split(","), line.split(","), strict=True)) for line in lines]
    assert [(row["card"], row["power_mw"], row["used_bytes"]) for row in rows[:2]] == [
        ("0", "350000", "100"),
        ("1", "", "101"),
    ]


def test_finished_parts_are_not_repeated(results: Path) -> None:
    before = (results / "gpu.json").read_bytes()
    done = command("--on_cpu", f"--output={results}")
    assert (done.returncode, done.stdout.count("\n")) == (0, 1)
    assert (results / "gpu.json").read_bytes() == before


def test_a_test_that_failed_is_named(tmp_path: Path) -> None:
    report = tmp_path / "pytest.xml"
    report.write_text(
        """<testsuites><testsuite><testcase classname="a" name="passes"/>
        <testcase classname="a" name="fails"><failure message="assert 1 == 2&#10;more">long</failure></testcase>
        <testcase classname="a" name="skips"><skipped message="no NCCL"/></testcase></testsuite></testsuites>"""
    )
    findings = Findings(tmp_path)
    tests.tell(report, findings, on_cpu=False)
    assert findings.aims["tests marked gpu"].met is False
    assert findings.figures == {"tests": 3, "passed": 1, "failed": 1, "skipped": 1}
    text = findings.texts["Not passed"]
    assert [word in text for word in ("a::fails", "assert 1 == 2", "a::skips", "a::passes")] == [True] * 3 + [False]


@pytest.mark.parametrize(
    "extra_us, met", [([10.0, 12.0, 11.0], True), ([-500.0, 480.0, 11.0], None), ([98.0, 102.0, 101.0], False)]
)
def test_a_small_cost_is_stated_if_the_rounds_agree(extra_us: list[float], met: bool | None) -> None:
    _, low, high = overhead.share_of(extra_us, step_us=10_000.0)
    assert overhead.met(low, high) is met


def test_without_a_gpu_it_is_refused_with_a_way_to_try_it(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    place = Place(tmp_path, on_cpu=False, limit_s=1.0)
    message = refusal(UsageError, lambda: machine.run(place, Findings(tmp_path)))
    assert_stored("benchmarks/refused: no GPU", {"machine": message})


def test_a_dry_run_lists_the_parts() -> None:
    done = command("--dry_run", "--time_limit=7")
    assert done.returncode == 0
    lines = done.stdout.splitlines()[2:]
    assert [line.split("|")[2].strip() for line in lines] == [part.name for part in PARTS]
    assert [line.split("|")[4].strip() for line in lines] == [f"{MACHINE.limit_s:g}"] + ["7"] * (len(PARTS) - 1)


def test_all_parts_together_end_within_eight_minutes() -> None:
    assert sum(part.limit_s for part in PARTS) <= 465  # and some seconds to start


def test_parts_are_chosen_by_number_or_name() -> None:
    assert [part.name for part in chosen(["5", "tests"])] == ["machine", "tests", "mfu"]
    assert chosen([]) == list(PARTS)
    assert_stored("benchmarks/refused: no such part", {"99": refusal(ValueError, lambda: chosen(["99"]))})
