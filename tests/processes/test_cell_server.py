"""The client of the program that starts cells, with that program as it is where nothing can be forked."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from raised import refusal
from stored_texts import assert_stored

from lm_profiler.cli.verbs.sweep import SPAWNING
from lm_profiler.processes.fork_server import CellEnded, CellServer, CellStarted, ServerError

SLOW = ["fit", "--help"]  # it loads torch first: seconds in which it can be killed


def events_until_end(server: CellServer, cells: int = 1) -> list[CellStarted | CellEnded]:
    events: list[CellStarted | CellEnded] = []
    while sum(isinstance(event, CellEnded) for event in events) < cells:
        events += server.events(60)
    return events


def until_it_runs(server: CellServer, cell: str) -> None:
    while CellStarted(cell) not in server.events(60):
        pass


@pytest.fixture
def descendants() -> Callable[[], list[psutil.Process]]:
    """Processes that came with the test: multiprocessing keeps one of its own once it was used."""
    before = psutil.Process().children(recursive=True)
    return lambda: [process for process in psutil.Process().children(recursive=True) if process not in before]


def test_a_cell_runs_and_tells_its_exit_code(tmp_path: Path, descendants: Callable[[], list[psutil.Process]]) -> None:
    with CellServer(SPAWNING) as server:
        server.start("good", ["--version"], tmp_path / "good.txt", {})
        assert events_until_end(server) == [CellStarted("good"), CellEnded("good", 0)]
        server.start("bad", ["fit", "--config=nowhere"], tmp_path / "bad.txt", {})
        assert events_until_end(server) == [CellStarted("bad"), CellEnded("bad", 2)]
        assert server.events(0) == []
    assert (tmp_path / "good.txt").read_text().startswith("lm_profiler ")
    assert "given nowhere" in (tmp_path / "bad.txt").read_text()
    assert descendants() == []


def test_cells_run_side_by_side_and_signals_go_to_the_right_one(tmp_path: Path) -> None:
    with CellServer(SPAWNING) as server:
        server.start("a", SLOW, tmp_path / "a.txt", {})
        server.start("b", ["--version"], tmp_path / "b.txt", {})
        server.signal("a", signal.SIGKILL)
        server.signal("nobody", signal.SIGKILL)
        ended = {e.cell: e.code for e in events_until_end(server, 2) if isinstance(e, CellEnded)}
    assert ended == {"a": -signal.SIGKILL, "b": 0}


def test_a_server_that_dies_takes_its_cells_along_and_is_started_again(
    tmp_path: Path, descendants: Callable[[], list[psutil.Process]]
) -> None:
    with CellServer(SPAWNING) as server:
        server.start("a", SLOW, tmp_path / "a.txt", {})
        until_it_runs(server, "a")
        program = descendants()[0]
        cells = program.children()
        program.kill()
        (lost,) = events_until_end(server)
        assert isinstance(lost, CellEnded)
        assert (lost.cell, lost.code) == ("a", None)
        assert_stored("processes/notes: a server that died", {"reason": lost.lost or ""})
        assert psutil.wait_procs(cells, timeout=60)[1] == []
        server.start("b", ["--version"], tmp_path / "b.txt", {})
        assert events_until_end(server) == [CellStarted("b"), CellEnded("b", 0)]


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    dies = "import os, time; os.close(0); time.sleep(0.5); raise SystemExit('no torch here')"  # it hangs up before
    with CellServer((sys.executable, "-c", dies)) as server:
        server.start("a", [], tmp_path / "a.txt", {})
        said = refusal(ServerError, lambda: events_until_end(server))
    assert_stored("processes/refused: a server that cannot start", {"exit code 1": said})


def test_a_cell_that_cannot_be_started_is_lost_alone(tmp_path: Path) -> None:
    with CellServer(SPAWNING) as server:
        server.start("a", ["--version"], tmp_path / "nowhere" / "a.txt", {})
        (lost,) = events_until_end(server)
        assert isinstance(lost, CellEnded)
        assert (lost.cell, lost.code) == ("a", None)
        assert_stored("processes/notes: a cell that cannot start", {"reason": lost.lost or ""})
        server.start("b", ["--version"], tmp_path / "b.txt", {})
        assert events_until_end(server) == [CellStarted("b"), CellEnded("b", 0)]


def test_the_program_ends_by_itself_when_nobody_asks_any_more() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        program = subprocess.Popen(SPAWNING, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    ours.close()
    assert program.communicate(timeout=60) == (b"", b"")
    assert program.returncode == 0
