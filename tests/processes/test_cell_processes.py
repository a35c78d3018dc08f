"""A forked cell finds what a process of its own finds; none of its processes outlives the sweep."""

import fcntl
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from stored_texts import assert_stored

from lm_profiler.cli.verbs.sweep import LOADED
from lm_profiler.processes.cell_processes import CellEnded, CellProcesses
from lm_profiler.record.run_record import RunRecord, read_run

USERS = """
import atexit, multiprocessing, os, random, signal, sys, threading, time
import numpy, torch
from lightning.pytorch.demos.boring_classes import BoringModel

class Users(BoringModel):
    def __init__(self, waits: bool = False):
        super().__init__()
        self.waits = waits

    def on_fit_start(self):
        main = sys.modules["__main__"]
        names = ("SIGINT", "SIGCHLD", "SIGPIPE", "SIGHUP")
        print("python", sys.argv[1:], sys.argv[0], main.__name__.rpartition(".")[2], main.__spec__.name, sys.path[0])
        print("signals", [str(signal.getsignal(getattr(signal, name))) for name in names], signal.set_wakeup_fd(-1))
        print("group", os.getpgrp() == os.getpid(), "stdin", repr(sys.stdin.read()), "tty", sys.stdout.isatty())
        print("files", sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)))
        print("threads", torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count())
        print("started", multiprocessing.get_start_method())
        print("random", torch.rand(1), torch.initial_seed(), numpy.random.rand(), random.random())
        print("device", os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.is_initialized(), torch.get_default_dtype())
        print("kineto", os.environ.get("KINETO_LOG_LEVEL"), os.getcwd(), sys.flags, threading.current_thread().name)
        atexit.register(print, "at the very end")
        threading.Thread(target=lambda: (threading.main_thread().join(), print("a thread's end"))).start()

    def training_step(self, batch, i):
        if self.waits:
            print(f"waiting {os.getpid()}\\n", end="", flush=True)  # one write, because two ranks print
            time.sleep(600)
        return super().training_step(batch, i)
"""
CONFIG = {
    "model": {"class_path": "users_cell.Users"},
    "data": None,
    "trainer": {"accelerator": "cpu"},
    "stages": {"warmup_steps": 1, "measure_steps": 2},
    "memory": {"steps": 0},
    "trace": {"steps": 0},
    "check_memory": False,  # a rehearsal of what waits would wait, too
}


@pytest.fixture(scope="module")
def started_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CellProcesses, Path]]:
    """Processes whose server loads torch when it is first asked for a cell, and the folder of the cells."""
    here = tmp_path_factory.mktemp("cells")
    (here / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (here / "users_cell.py").write_text(USERS)
    with CellProcesses("lm_profiler", LOADED) as processes:
        yield processes, here


@pytest.fixture
def here(started_once: tuple[CellProcesses, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(started_once[1])
    return started_once[1]


@pytest.fixture
def processes(started_once: tuple[CellProcesses, Path], here: Path) -> CellProcesses:
    return started_once[0]


def begin(processes: CellProcesses, name: str, here: Path) -> None:
    call = ["fit", "--config=config.yaml", "--name=cell", f"--log_dir={name}"]
    processes.start(name, call, here / f"{name}.txt", {"CUDA_VISIBLE_DEVICES": "7"})


def end(processes: CellProcesses, name: str, here: Path) -> tuple[str, RunRecord]:
    """What the only cell that ends printed, and its record."""
    (ended,) = processes.wait_for_ends(120)
    assert ended.cell == name
    return (here / f"{name}.txt").read_text().replace(name, "NAME"), read_run(here / name / "cell" / "version_0")


def test_a_forked_cell_finds_what_a_process_of_its_own_finds(processes: CellProcesses, here: Path) -> None:
    with CellProcesses("lm_profiler") as fresh:
        begin(fresh, "run_of_spawn", here)
        begin(processes, "run_of_fork", here)  # side by side: each has to load torch
        printed, spawned = end(fresh, "run_of_spawn", here)
        first, forked = end(processes, "run_of_fork", here)
    begin(processes, "run_of_another", here)
    second, _ = end(processes, "run_of_another", here)
    facts = [[line for line in text.splitlines() if line.split(" ")[0] in FACTS] for text in (printed, first, second)]
    assert len(facts[0]) == len(FACTS)
    assert facts[1] == facts[0]
    assert facts[2] == facts[0]
    assert [line.endswith(("thread's end", "very end")) for line in first.splitlines()[-2:]] == [True, True]
    same = {"status", "steps", "model", "overrides", "verb"}
    assert forked.model_dump(include=same) == spawned.model_dump(include=same)
    assert forked.environment == spawned.environment
    assert "Traceback" not in first


FACTS = ("python", "signals", "group", "files", "threads", "started", "random", "device", "kineto")


def test_ranks_of_a_forked_cell_go_with_it(processes: CellProcesses, here: Path) -> None:
    """That ranks which Lightning starts run in a forked cell: the pages of sweeps, in ``test_docs.py``."""
    output = here / "waits.txt"
    call = ["fit", "--config=config.yaml", "--name=waits", "--model.waits=true", "--trainer.devices=2"]
    processes.start("waits", [*call, "--trainer.strategy=ddp_fork"], output, {})
    while output.read_text().count("waiting") < 2:
        assert processes.wait_for_ends(0.1) == [], output.read_text()
    pids = [int(line.split()[1]) for line in output.read_text().splitlines() if line.startswith("waiting")]
    ranks = [psutil.Process(pid) for pid in pids]
    leader = psutil.Process(os.getpgid(pids[0]))
    leader.kill()  # as the system does; the other rank would wait for it for ever
    assert processes.wait_for_ends(60) == [CellEnded("waits", -9)]
    assert psutil.wait_procs(ranks, timeout=60)[1] == []


def test_a_wrong_call_has_its_exit_code_and_its_message(processes: CellProcesses, here: Path) -> None:
    processes.start("bad", ["fit", "--config=nowhere"], here / "bad.txt", {})
    assert processes.wait_for_ends(60) == [CellEnded("bad", 2)]
    assert "given nowhere" in (here / "bad.txt").read_text()
    processes.start("lost", ["--version"], here / "nowhere" / "a.txt", {})
    (lost,) = processes.wait_for_ends(60)
    assert (lost.cell, lost.code) == ("lost", None)
    assert_stored("processes/notes: a cell that cannot start", {"reason": lost.lost or ""})
    assert processes.wait_for_ends(0) == []


PROGRAM = """
import subprocess, time
helper = subprocess.Popen(["sleep", "600"])
print(helper.pid, flush=True)
time.sleep(600)
"""
"""A program that starts a process of its own, as DDP does, and waits."""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "waiting_program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "waiting_program"


def whole_group(output: Path) -> list[psutil.Process]:
    """The cell and its helper, once both run."""
    while not (output.exists() and output.read_text().endswith("\n")):
        time.sleep(0.01)
    helper = psutil.Process(int(output.read_text()))
    cell = helper.parent()
    assert os.getpgid(helper.pid) == cell.pid
    return [cell, helper]


def test_children_of_a_killed_cell_end(program: str, tmp_path: Path) -> None:
    with CellProcesses(program) as processes:
        processes.start("a", [], tmp_path / "a.txt", {})
        processes.start("b", [], tmp_path / "b.txt", {})
        group_a, group_b = whole_group(tmp_path / "a.txt"), whole_group(tmp_path / "b.txt")
        group_a[0].kill()
        assert processes.wait_for_ends(60) == [CellEnded("a", -9)]
        assert psutil.wait_procs(group_a, timeout=60)[1] == []
        processes.signal("nobody", 9)
        processes.signal("b", 9)
        assert processes.wait_for_ends(60) == [CellEnded("b", -9)]
        processes.start("c", [], tmp_path / "c.txt", {})
        group_c = whole_group(tmp_path / "c.txt")
    assert psutil.wait_procs([*group_b, *group_c], timeout=60)[1] == []


def test_no_process_is_left_when_the_sweep_is_killed(program: str, tmp_path: Path) -> None:
    code = f"""
        import fcntl, os, sys
        from pathlib import Path
        from lm_profiler.processes.cell_processes import CellProcesses
        lock = os.open("lock", os.O_CREAT | os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)
        with CellProcesses({program!r}, ["json"], lock) as processes:
            processes.start("cell", [], Path("out.txt"), {{}})
            sys.stdin.read()
    """
    sweep = subprocess.Popen((sys.executable, "-c", textwrap.dedent(code)), stdin=subprocess.PIPE)
    group = whole_group(tmp_path / "out.txt")
    others = psutil.Process(sweep.pid).children(recursive=True)
    lock = os.open(tmp_path / "lock", os.O_RDWR)
    sweep.kill()
    sweep.communicate()
    assert psutil.wait_procs([*group, *others], timeout=60)[1] == []
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(lock)
