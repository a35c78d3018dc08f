"""Questions that a copy of this process answers, or does not."""

import os
import signal
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path

import only_fresh
import pytest
import torch
import warm
from raised import refusal
from stored_texts import assert_stored

from lm_profiler.processes import child
from lm_profiler.processes.child import Child, NoAnswer


def test_a_child_changes_nothing_in_this_process(capfd: pytest.CaptureFixture[str]) -> None:
    def find() -> int:
        os.write(1, b"not heard")
        os.environ["CHANGED"] = "1"
        return os.getpid()

    assert Child(find, 60.0).answer() != os.getpid()
    assert "CHANGED" not in os.environ
    assert capfd.readouterr() == ("", "")


def test_a_missing_answer_has_its_reason() -> None:
    with pytest.raises(NoAnswer, match="ended: exit code 3"):
        Child(partial(os._exit, 3), 60.0).answer()
    with pytest.raises(NoAnswer, match="ended: SIGKILL"):
        Child(lambda: os.kill(os.getpid(), signal.SIGKILL), 60.0).answer()
    with pytest.raises(NoAnswer, match=r"took more than 0\.3 s$"):
        Child(partial(time.sleep, 600.0), 0.1).answer()


def test_the_limit_of_a_child_is_cpu_time() -> None:
    """What is left of it counts down in the child, to which this leaves little."""

    def find() -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.1)
        while True:
            pass

    left_s, _ = Child(partial(signal.getitimer, signal.ITIMER_PROF), 60.0).answer()
    assert 59.0 < left_s <= 60.1  # the kernel counts in ticks
    message = refusal(NoAnswer, lambda: Child(find, 60.0).answer())
    assert_stored("processes/refused: too much CPU time", {"60 s": message})


def test_a_fresh_process_is_used_if_a_copy_is_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(only_fresh, "FRESH", False)
    assert Child(only_fresh.find, 120.0).answer() == "found"


def test_a_copy_of_a_process_that_has_counted_its_gpus_is_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    """GradScaler does, and ``torch.cuda.is_available``: backward would end the copy."""
    assert Child(os.getppid, 60.0).answer() == os.getpid()  # there was no GPU to count
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert Child(os.getppid, 60.0)._receive()[0] == "unfit"


def test_unpicklable_questions_are_refused_before_a_process_starts() -> None:
    class Mine:
        pass

    Mine.__module__, Mine.__qualname__ = "__main__", "Mine"
    started = [*warm.STARTED]
    given = {"a lambda": lambda: 0, "260 MiB": bytes(260 << 20), "of the script": Mine()}
    messages = {
        case: refusal(NoAnswer, lambda one=one: Child(partial(len, [one]), 60.0, fresh=True).answer())
        for case, one in given.items()
    }
    assert started == warm.STARTED
    assert "lambda" in messages["a lambda"]
    own_words, *_ = messages["a lambda"].split(": ")  # pickle's words follow, which differ between versions of Python
    messages["a lambda"] = own_words
    assert_stored("processes/refused: what cannot be sent", messages)


def test_a_fresh_interpreter_has_the_same_imports() -> None:
    with warm.fresh_processes():
        assert Child(os.getppid, 60.0, fresh=True).answer() == os.getpid()
        assert Child(only_fresh.find, 60.0, fresh=True).answer() == "found"


def test_memory_has_a_limit() -> None:
    with pytest.raises(NoAnswer, match=r"^MemoryError"):
        Child(partial(bytearray, 8 << 30), 60.0, fresh=True, limit_bytes=4 << 30).answer()
    with pytest.raises(NoAnswer, match=r"^ValueError: invalid literal"):
        Child(partial(int, "one"), 60.0, fresh=True).answer()


def test_a_child_has_no_ranks_and_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    given = child.child_environment()
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & given.keys()
    assert (given["CUDA_VISIBLE_DEVICES"], given["TORCHDYNAMO_DISABLE"]) == ("", "1")


def _is_gone(pid: str) -> bool:
    """Also where whoever adopted it is slow."""
    stat = Path("/proc", pid, "stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("answers", [True, False])
def test_no_child_process_is_left(answers: bool, tmp_path: Path) -> None:
    def find() -> None:
        folder = tempfile.mkdtemp()
        pids = [str(subprocess.Popen(["sleep", "600"]).pid)]
        for kind in ("", "setsid "):  # which leaves the group; sh ends, so that their parent is another
            pids.append(subprocess.check_output(["sh", "-c", f"{kind}sleep 600 >/dev/null & echo $!"], text=True))
        (tmp_path / "written").write_text(f"{folder} {' '.join(pids)}")
        (tmp_path / "written").rename(tmp_path / "complete")
        time.sleep(0.0 if answers else 600.0)

    child = Child(find, 60.0)
    while not (tmp_path / "complete").exists():
        time.sleep(0.01)
    if answers:
        child.answer()
    child.end()
    folder, *pids = (tmp_path / "complete").read_text().split()
    until = time.monotonic() + 60.0
    while not all(map(_is_gone, pids)):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert not Path(folder).parent.exists()


def test_a_process_that_cannot_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/dev/null")  # where no folder can be made
    child = Child(os.getpid, 60.0, fresh=True)
    message = refusal(NoAnswer, child.answer)
    assert_stored("processes/refused: no process", {"no folder": message.partition(": '")[0]})
