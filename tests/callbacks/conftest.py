"""Runs of the tests here stand alone."""

from pathlib import Path

import pytest

from lm_profiler.measure.counts.flops import UncountableError


@pytest.fixture(autouse=True)
def own_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs go to ``logs`` in the current folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def counted_apart(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The modules that another process was asked to count; each of hundreds of runs would start one."""
    asked: list[object] = []

    def count(module: object, *_: object) -> None:
        asked.append(module)
        raise UncountableError("not counted here")

    monkeypatch.setattr("lm_profiler.callbacks.instruments.work.count_elsewhere", count)
    return asked


@pytest.fixture
def hands_over_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hand a watched run over after every millisecond, so that short runs do all that long ones do."""
    monkeypatch.setattr("lm_profiler.callbacks.watching._HAND_NS", 1_000_000)
