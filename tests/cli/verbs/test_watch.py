"""The verbs ``watch`` and ``trace``: what they show and ask, and what they refuse."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock

import numpy as np
import pytest
from made_parts import made_kernels
from stored_texts import assert_stored

from lm_profiler.cli.main import main
from lm_profiler.cli.verbs import watch
from lm_profiler.cli.verbs.watch import watched_folder
from lm_profiler.record.calls import FAILED, OK, WRONG_CALL
from lm_profiler.record.files import read_part
from lm_profiler.record.watch_files import (
    EVENTS,
    STATUS,
    WINDOWS,
    Sketch,
    TraceRequest,
    WatchEvent,
    WatchStatus,
    WatchWindow,
    append_lines,
    process_name,
    read_status,
    request_file,
)
from lm_profiler.report.run.watch_tables import event_text


def killed_watched_run(folder: Path, **known: object) -> Path:
    """A watched run of two ranks, of which rank 1 fell silent."""
    ledger = {"step: forward": 90.0, "validation": 9.0, "unexplained": 1.0}
    for rank, written_s in ((0, 1000.0), (1, 800.0)):
        status = WatchStatus(
            **{"rank": rank, "began_s": 900.0, "written_s": written_s, "steps": 7000, "phase": "backward",
               "ledger": ledger, "wall_s": 100.0, "world_size": 2, "silent": {} if rank else {1: 800.0}, **known}
        )  # fmt: skip
        status.write(folder / (f"watch.rank{rank}.json" if rank else STATUS))
    step = Sketch.from_seconds(np.full(1000, 0.0129))
    append_lines(folder / WINDOWS, [WatchWindow(first_step=1, steps=1000, began_s=900.0, seconds={"step": step})])
    level = WatchEvent(at_s=950.0, step=4200, kind="level", part="data", now=0.102, against=0.1, since_step=4000)
    late = WatchEvent(at_s=960.0, rank=1, step=4300, kind="rank late", part="data", now=0.2, against=0.1, cost_s=9.0)
    silent = WatchEvent(at_s=970.0, rank=1, step=4400, kind="silent rank", part="backward", now=60.0)
    append_lines(folder / EVENTS, [level, late, silent])
    return folder


def test_a_watched_run_is_shown_once_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["watch", str(killed_watched_run(tmp_path))]) == OK
    shown = capsys.readouterr().out
    for words in (
        "90.0%",
        "validation",
        "12.900",
        "4,200",
        "data",
        "2.0% slower in data since step 4,000: the step takes 102 ms, before 100 ms",
        "silent since",
    ):
        assert words in shown
    events = [line for line in shown.splitlines() if "late once in" in line or "no report since" in line]
    assert_stored("cli/watch", {"events of rank 1": events})


def test_growth_of_memory_has_its_rate_and_amounts() -> None:
    fast = WatchEvent(step=900, kind="memory", now=3600 * 5e6, since_step=700, grew_bytes=10**8, held_bytes=8 * 10**8)
    slow = fast.model_copy(update={"now": 5e8, "full_in_s": 7200.0})
    ended = fast.model_copy(update={"until_step": 90_000})
    older = WatchEvent(step=900, kind="memory", now=5e8, full_in_s=7200.0)
    assert_stored("cli/watch_memory", {"events": [event_text(event) for event in (fast, slow, ended, older)]})


def test_the_version_written_last_is_watched(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    for age, version in ((2, "version_10"), (1, "version_9")):
        (logs / version).mkdir(parents=True)
        status = killed_watched_run(logs / version, steps=age) / STATUS
        os.utime(status, (1e9 - age, 1e9 - age))
    assert watched_folder(logs) == logs / "version_9"


@pytest.mark.parametrize("process", [process_name(), "elsewhere 99999999 0", ""], ids=["here", "elsewhere", "unknown"])
def test_a_run_of_any_process_can_be_watched(process: str, tmp_path: Path) -> None:
    assert main(["watch", str(killed_watched_run(tmp_path, process=process))]) == OK


GONE = f"{process_name().rsplit(' ', 2)[0]} 99999999 0"  # the name of a process that does not run on this machine


@pytest.mark.parametrize("verb", ["watch", "trace"])
@pytest.mark.parametrize("known, words", [({"ended": True}, "has ended"), ({"process": GONE}, "was killed")])
def test_a_run_that_does_not_go_on(
    verb: str, known: dict[str, object], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    has_nothing_left_to_do = verb == "watch" and "ended" in known
    exit_code = OK if has_nothing_left_to_do else WRONG_CALL
    assert main([verb, str(killed_watched_run(tmp_path, **known))]) == exit_code
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    assert words in shown.err
    assert ("where the time went" in shown.out) == (verb == "watch")
    assert not request_file(tmp_path, 0).exists()


def test_killed_ranks_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    killed_watched_run(tmp_path, silent={}, ended=True)
    read_status(tmp_path, 1).model_copy(update={"ended": False, "process": GONE}).write(tmp_path / "watch.rank1.json")
    main(["watch", str(tmp_path)])
    shown = capsys.readouterr().out.splitlines()
    ranks = [line.split()[2:] for line in shown if line.endswith(("ended", "backward"))]
    assert ranks == [["ended"], ["killed,", "last", "in", "backward"]]
    # A second request waits for the first and nobody takes it.
    folder = tmp_path / "folder"
    folder.mkdir()
    TraceRequest(steps=3).write(request_file(killed_watched_run(folder), 0))
    assert main(["trace", str(folder)]) == WRONG_CALL
    assert "pending trace request" in capsys.readouterr().err
    assert read_part(request_file(folder, 0), TraceRequest, "a request").steps == 3
    request_file(folder, 0).unlink()
    assert main(["trace", str(folder), "--patience_s", "0.2"]) == FAILED
    assert not request_file(folder, 0).exists()


@pytest.mark.parametrize("verb", ["watch", "trace"])
def test_a_run_that_is_not_there_or_not_watched(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, str(tmp_path / "no")]) == WRONG_CALL
    assert main([verb, str(tmp_path)]) == WRONG_CALL
    assert main([verb]) == WRONG_CALL
    (tmp_path / STATUS).write_text("{")
    assert main([verb, str(tmp_path)]) == WRONG_CALL
    assert capsys.readouterr().err.count("lm_profiler: ") == 4


@pytest.mark.parametrize(
    "known, options",
    [
        ({"ended": True}, []),
        ({"traces": False}, []),
        ({}, ["--rank", "2"]),
        ({}, ["--steps", "0"]),
        ({}, ["--steps", "101"]),
    ],
)
def test_impossible_trace_requests_are_refused(known: dict[str, bool], options: list[str], tmp_path: Path) -> None:
    assert main(["trace", str(killed_watched_run(tmp_path, **known)), *options]) == WRONG_CALL
    assert not request_file(tmp_path, 0).exists()


def test_a_silent_training_is_not_watched_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    slept_s: list[float] = []
    assert watch._watch(killed_watched_run(tmp_path), slept_s.append, lambda: sum(slept_s)) == FAILED
    assert sum(slept_s) == 60.0
    assert "no report" in capsys.readouterr().err


def test_two_processes_watch_a_run_with_a_wrong_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    killed_watched_run(tmp_path)
    status, files = read_status(tmp_path), {path.name for path in tmp_path.iterdir()}
    looks = [0, 0]
    one_writes = Lock()

    def sleep(seconds: float, number: int) -> None:  # of one who watches: the training writes once for both
        with one_writes:  # else one of them could write again that the run goes on, after the other has ended it
            looks[number] += 1
            hours_ahead = status.model_copy(update={"written_s": time.time() + 7200.0 + looks[number]})
            hours_ahead.model_copy(update={"ended": max(looks) >= 50}).write(tmp_path / STATUS)
        time.sleep(0.01)

    with ThreadPoolExecutor(2) as pool:
        looking = [partial(watch._watch, tmp_path, partial(sleep, number=number)) for number in (0, 1)]
        ends = [pool.submit(watch) for watch in looking]
    assert [end.result() for end in ends] == [OK, OK]
    assert max(looks) == 50
    assert {path.name for path in tmp_path.iterdir()} == files  # who watches leaves nothing


@pytest.mark.parametrize("rank, code", [(0, FAILED), (1, OK)])
def test_a_trace_of_another_rank_is_no_answer(rank: int, code: int, tmp_path: Path) -> None:
    def rank_1_is_traced(_: float) -> None:
        (tmp_path / "trace").mkdir(exist_ok=True)
        made_kernels([], {}, 1.0).write(tmp_path / "trace" / "rank1.step9.kernels.json")

    options = watch.TraceOptions(run=killed_watched_run(tmp_path), rank=rank, patience_s=0.2)
    assert watch.run_trace(options, rank_1_is_traced) == code
