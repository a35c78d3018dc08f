"""When a process is ended whose main thread cannot, on a clock of the test's own."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from lm_profiler.cli import watchdog
from lm_profiler.cli.watchdog import Watchdog, watched

TERM, CHILD = bytes([signal.SIGTERM]), bytes([signal.SIGCHLD])


@dataclass
class Process:
    """One that has begun a run of two ranks."""

    is_leaving: bool = False
    ends_well: bool = False
    others_are_over: bool = False
    runs_alone: bool = False
    codes: list[int | None] = field(default_factory=list)
    now_s: float = 0.0
    said: list[tuple[str, int, int]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        context: Any = type(
            "RunContext", (), {"profiler": self, "last_words": lambda _, *said: self.said.append(said) or 130}
        )()
        children: Any = [
            type("Child", (), {"poll": lambda _, code=code: code, "kill": lambda _: None})() for code in self.codes
        ]
        self.watchdog = Watchdog(context, lambda: children, self.left.append, lambda: self.now_s)

    def is_ended_after(self, signals: bytes = b"") -> float | None:
        """In seconds; None where it is left alone."""
        for half in range(121):
            self.now_s = half / 2
            if self.watchdog.look(signals if half == 0 else b""):
                return self.now_s
        return None


def test_a_process_to_which_nothing_happens_is_left_alone() -> None:
    assert Process(codes=[None, 0]).is_ended_after(CHILD) is None


@pytest.mark.parametrize(
    "process,signals,after_s",
    [
        (Process(), TERM, 5.5),
        (Process(is_leaving=True), TERM, 30.5),
        (Process(others_are_over=True), b"", 2.0),
        (Process(codes=[None, -9]), b"", 5.5),
        (Process(codes=[None, -9], is_leaving=True), b"", 30.5),
        (Process(codes=[None, -9], is_leaving=True, ends_well=True), b"", None),
    ],
    ids=[
        "signal",
        "signal while it ends",
        "another rank",
        "a child",
        "a child while it fails",
        "a child while it ends well",
    ],
)
def test_the_main_thread_comes_first(process: Process, signals: bytes, after_s: float | None) -> None:
    assert process.is_ended_after(signals) == after_s


def test_it_says_what_has_happened_and_ends_with_the_code_of_the_run() -> None:
    process = Process(codes=[None, -9])
    assert process.is_ended_after() is not None
    process.watchdog.end()
    ((said, *codes),) = process.said
    assert "SIGKILL" in said
    assert (codes, process.left) == ([0, 2], [130])
    process = Process()
    process.is_ended_after(TERM)
    process.watchdog.end()
    assert process.said == [("SIGTERM", signal.SIGTERM, 0)]


def test_a_rank_whose_parent_is_gone_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process()
    assert process.is_ended_after() is None
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert Process().is_ended_after() is None
    assert process.is_ended_after() is None  # a first rank may outlive its shell
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert process.is_ended_after() == 5.5


def test_a_thread_hears_a_signal_that_the_main_thread_does_nothing_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_GRACE_S", 0.0)
    process, before = Process(), signal.signal(signal.SIGTERM, lambda *_: None)
    ended = threading.Event()
    process.watchdog.leave = lambda code: (process.left.append(code), ended.set())
    process.watchdog.clock = time.monotonic
    try:
        with watched(process.watchdog):
            os.kill(os.getpid(), signal.SIGTERM)
            assert ended.wait(30)
        assert (process.said, process.left) == ([("SIGTERM", signal.SIGTERM, 0)], [130])
        with watched(Process().watchdog):
            watchdog._sleep_in_child()  # in a forked process its signals are no business of its parent's
            assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signal.set_wakeup_fd(-1) == -1
