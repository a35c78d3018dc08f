"""Questions that a copy of this process answers, or does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import only_fresh
import pytest
import torch

from lm_profiler.cli.asked import Asked, NoAnswer


def test_the_answer_is_another_processs_which_changes_nothing_here(capfd: pytest.CaptureFixture[str]) -> None:
    def find() -> int:
        os.write(1, b"not heard")
        os.environ["CHANGED"] = "1"
        return os.getpid()

    assert Asked(find, 60.0).answer() != os.getpid()
    assert "CHANGED" not in os.environ
    assert capfd.readouterr() == ("", "")


def test_no_answer_says_whether_the_process_ended_or_took_too_long() -> None:
    with pytest.raises(NoAnswer, match="ended with exit code 3"):
        Asked(partial(os._exit, 3), 60.0).answer()
    with pytest.raises(NoAnswer, match="killed by SIGKILL"):
        Asked(lambda: os.kill(os.getpid(), signal.SIGKILL), 60.0).answer()
    with pytest.raises(NoAnswer, match=r"took more than 0\.1 s"):
        Asked(partial(time.sleep, 600.0), 0.1).answer()


def test_where_a_copy_is_unfit_a_fresh_process_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(only_fresh, "FRESH", False)
    assert Asked(only_fresh.find, 120.0).answer() == "found"


def test_a_copy_of_a_process_that_has_counted_its_gpus_is_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    """GradScaler does, and ``torch.cuda.is_available``: backward would end the copy."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert Asked(os.getppid, 60.0).answer() == os.getpid()  # there was no GPU to count
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert Asked(os.getppid, 60.0)._told() is None


def test_nothing_of_a_process_without_an_answer_is_left(tmp_path: Path) -> None:
    def find() -> None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (tmp_path / "written").write_text(str(child.pid))
        (tmp_path / "written").rename(tmp_path / "pid")
        time.sleep(600.0)

    asked = Asked(find, 60.0)
    while not (tmp_path / "pid").exists():
        time.sleep(0.01)
    asked.end()
    stat = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    until = time.monotonic() + 60.0
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":  # whoever adopted it may be slow
        assert time.monotonic() < until
        time.sleep(0.01)
