"""Runs of the tests here stand alone."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs go to ``logs`` in the current folder."""
    monkeypatch.chdir(tmp_path)
