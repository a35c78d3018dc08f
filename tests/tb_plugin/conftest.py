"""Lets the tests here import their neighbours, and runs made by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tensorboard.backend import security_validator

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "report")]

from served import Get, get_from  # noqa: E402 - a neighbour


@pytest.fixture
def logdir(tmp_path: Path) -> Path:
    """Empty, with a secret beside it."""
    (tmp_path / "secret.txt").write_text("a secret")
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder


@pytest.fixture
def get(logdir: Path) -> Get:
    return get_from(str(logdir))


@pytest.fixture
def complaints(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What TensorBoard finds wrong with the headers of the responses."""
    found: list[str] = []
    monkeypatch.setattr(security_validator, "_maybe_raise_value_error", found.append)
    return found
