"""Runs of the tests here stand alone."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs go to ``logs`` in the current folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second of matrix products after each run would double the time of these tests; the scripts do them."""
    monkeypatch.setattr("lm_profiler.callbacks.outcome.afterwards.known_ceiling", lambda device, dtype, say: None)
