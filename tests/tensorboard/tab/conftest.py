"""A folder of runs, and the tab's answers about it."""

from pathlib import Path

import pytest
from served import Get, get_from
from tensorboard.backend import security_validator


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
