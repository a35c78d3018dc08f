"""``collectives`` on two processes of this machine, and calls that it refuses."""

import json
import socket
from pathlib import Path

import pytest
from stored_texts import assert_stored

from lm_profiler.cli.main import main
from lm_profiler.cli.surroundings import warn_of_shared_cores


def test_every_collective_is_timed(tmp_path: Path) -> None:
    table, picture = tmp_path / "collectives.json", tmp_path / "bandwidth.svg"
    options = ["--sizes", "10KB", "0.1MB", "--repeats", "6", f"--output={table}", f"--plot={picture}"]
    assert main(["collectives", *options]) == 0
    rows = json.loads(table.read_text())
    assert [(row["collective"], row["size_bytes"]) for row in rows] == [
        (op, size) for op in ("all_reduce", "all_gather", "reduce_scatter", "broadcast") for size in (10_000, 100_000)
    ]
    for row in rows:
        assert (row["backend"], row["processes"], row["repeats"]) == ("gloo", 2, 6)
        assert row["median_s_low"] <= row["median_s"] <= row["median_s_high"]
        assert row["algbw_bytes_per_s"] == pytest.approx(row["size_bytes"] / row["median_s"])
    assert picture.read_text().count("<path") > 8


@pytest.mark.parametrize(
    "options, subject",
    [
        (["--ops", "scatter"], "ops"),
        (["--sizes", "1MX"], "sizes"),
        (["--sizes", "2TiB"], "sizes"),
        (["--processes", "1"], "processes"),
        (["--repeats", "5"], "repeats"),
        (["--budget_s", "nan"], "budget_s"),
        (["--output", "table.html"], "output"),
        (["--plot", "plot.txt"], "plot"),
        (["--backend", "mpi"], "backend"),
    ],
)
def test_a_wrong_call_is_refused_in_a_line(options: list[str], subject: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["collectives", *options]) == 2
    assert capfd.readouterr().err.startswith(f"lm_profiler: {subject}: ")


def test_a_port_that_is_taken_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    with socket.create_server(("localhost", 0)) as taken:
        port, messages = str(taken.getsockname()[1]), {}
        monkeypatch.setenv("MASTER_PORT", port)
        for call in (["collectives", "--sizes", "1KB"], ["fit", "--trainer.accelerator=cpu", "--trainer.devices=2"]):
            assert main(call) == 2
            (line,) = capfd.readouterr().err.splitlines()
            messages[call[0]] = line.replace(port, "PORT")
    assert_stored("cli/ranks: taken port", messages)


def test_more_processes_than_cores_are_noted(capfd: pytest.CaptureFixture[str]) -> None:
    for count in (2, 3):
        warn_of_shared_cores(count, 2, "the step")
    (line,) = capfd.readouterr().err.splitlines()
    assert_stored("cli/ranks: cores", {"3 of 2": line})
