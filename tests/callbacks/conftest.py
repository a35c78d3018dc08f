"""Runs of the tests here stand alone."""

import sys
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def own_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs go to ``logs`` in the current folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second of matrix products after each run would double the time of these tests; the scripts do them."""
    monkeypatch.setattr("lm_profiler.callbacks.outcome.afterwards.known_ceiling", lambda device, dtype, say: None)


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> None:
    """As in a fresh process: a graph that another test compiled may be called by no step of this one."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
