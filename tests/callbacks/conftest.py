"""Runs of the tests here stand alone."""

import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import warm
from counted_apart import CountedApart


@pytest.fixture(autouse=True, scope="module")
def no_rates() -> Iterator[None]:
    """Leave the ceiling and the bandwidth of this machine unknown; to read them takes half a second a run."""
    with warm.with_rates(flops_per_s=None, bytes_per_s=None):
        yield


@pytest.fixture(autouse=True)
def own_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs go to ``logs`` in the current folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def counted_apart(monkeypatch: pytest.MonkeyPatch) -> CountedApart:
    """Start no process that counts a step; each of hundreds of runs would start one."""
    counted = CountedApart()
    monkeypatch.setattr("lm_profiler.callbacks.instruments.work.count_elsewhere", counted)
    return counted


@pytest.fixture
def quiet_trainers() -> Iterator[None]:
    """Let Trainers report nothing below an error."""
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


@pytest.fixture
def interrupts_as_before() -> Iterator[None]:
    """Lightning ignores SIGINT from the first KeyboardInterrupt on."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def hands_over_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hand a watched run over after every millisecond, so that short runs do all that long ones do."""
    monkeypatch.setattr("lm_profiler.callbacks.watching._HAND_OVER_NS", 1_000_000)
