"""A forked cell finds what a process of its own finds, ranks of DDP included; and dies with the server."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from stored_texts import assert_stored

from lm_profiler.cli.verbs.sweep import FORKING, SPAWNING
from lm_profiler.processes.fork_server import CellEnded, CellServer, CellStarted
from lm_profiler.record.run_record import RunRecord, read_run

USERS = """
import atexit, os, random, signal, sys, threading, time, warnings
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
        print("pipes", [fd for fd in os.listdir("/proc/self/fd") if "pipe" in link(fd)])
        print("threads", torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count())
        print("random", torch.rand(1), torch.initial_seed(), numpy.random.rand(), random.random())
        print("device", os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.is_initialized(), torch.get_default_dtype())
        print("kineto", os.environ.get("KINETO_LOG_LEVEL"), os.getcwd(), sys.flags, threading.current_thread().name)
        atexit.register(print, "at the very end")
        threading.Thread(target=lambda: (threading.main_thread().join(), print("a thread's end"))).start()

    def training_step(self, batch, i):
        if self.waits:
            print("waiting", os.getpid(), flush=True)
            time.sleep(600)
        return super().training_step(batch, i)

def link(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""
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
def started_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CellServer, Path]]:
    """A server, which loads torch when it is first asked for a cell, and the folder of its cells."""
    here = tmp_path_factory.mktemp("cells")
    (here / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (here / "users_cell.py").write_text(USERS)
    with CellServer(FORKING) as server:
        yield server, here


@pytest.fixture
def here(started_once: tuple[CellServer, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(started_once[1])
    return started_once[1]


@pytest.fixture
def server(started_once: tuple[CellServer, Path], here: Path) -> CellServer:
    return started_once[0]


def its_end(server: CellServer) -> CellEnded:
    while True:
        for event in server.events(120):
            if isinstance(event, CellEnded):
                return event


def program_of(server: CellServer) -> psutil.Process:
    assert server._process is not None
    return psutil.Process(server._process.pid)


def begin(server: CellServer, name: str, here: Path, *options: str) -> None:
    call = ["fit", "--config=config.yaml", "--name=cell", f"--log_dir={name}", *options]
    server.start(name, call, here / f"{name}.txt", {"CUDA_VISIBLE_DEVICES": "7"})


def end(server: CellServer, name: str, here: Path) -> tuple[str, RunRecord]:
    """What the only cell that ends printed, and its record."""
    its_end(server)
    return (here / f"{name}.txt").read_text().replace(name, "NAME"), read_run(here / name / "cell" / "version_0")


def test_a_forked_cell_finds_what_a_process_of_its_own_finds(server: CellServer, here: Path) -> None:
    with CellServer(SPAWNING) as spawning:
        begin(spawning, "run_of_spawn", here)
        begin(server, "run_of_fork", here)  # side by side: each has to load torch
        said, spawned = end(spawning, "run_of_spawn", here)
        first, forked = end(server, "run_of_fork", here)
    begin(server, "run_of_another", here)
    second, _ = end(server, "run_of_another", here)
    facts = [[line for line in text.splitlines() if line.split(" ")[0] in FACTS] for text in (said, first, second)]
    assert len(facts[0]) == len(FACTS)
    assert facts[1] == facts[0]
    assert facts[2] == facts[0]
    assert [line.endswith(("thread's end", "very end")) for line in first.splitlines()[-2:]] == [True, True]
    same = {"status", "steps", "model", "overrides", "verb"}
    assert forked.model_dump(include=same) == spawned.model_dump(include=same)
    assert forked.environment == spawned.environment
    assert "Traceback" not in first


FACTS = ("python", "signals", "group", "files", "pipes", "threads", "random", "device", "kineto")


def test_ranks_of_a_forked_cell_run_and_go_with_it(server: CellServer, here: Path) -> None:
    output = here / "waits.txt"
    call = ["fit", "--config=config.yaml", "--name=waits", "--model.waits=true", "--trainer.devices=2"]
    server.start("waits", [*call, "--trainer.strategy=ddp_fork"], output, {})
    while CellStarted("waits") not in server.events(60):
        pass
    # Side by side; rank 1 of this one is started by Lightning, and has to load torch.
    begin(server, "ddp", here, "--trainer.devices=2", "--trainer.strategy=ddp")
    _, record = end(server, "ddp", here)
    assert record.status == "ok"
    assert record.environment is not None
    assert record.environment.world_size == 2

    while output.read_text().count("waiting") < 2:
        assert server.events(0.1) == [], output.read_text()
    program = program_of(server)
    (rank0,) = program.children()
    ranks = [rank0, *rank0.children(recursive=True)]
    assert len(ranks) >= 2
    rank0.kill()  # as the system does; the other rank would wait for it for ever
    assert CellEnded("waits", -9) in server.events(60)
    assert psutil.wait_procs(ranks, timeout=60)[1] == []


TWO = """
import subprocess, sys, time
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("torch" in sys.modules, "loaded" in sys.modules, helper.pid, flush=True)
time.sleep(600)
"""
"""A program that starts a process of its own, as DDP does, and waits."""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The program above from a server that has loaded next to nothing."""
    for name, text in {"two": TWO, "loaded": "", "stuck": "import time; time.sleep(600)"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    return (*SPAWNING[:-1], "two", "loaded")


def whole_group(output: Path) -> list[psutil.Process]:
    """The cell and its helper, once both run."""
    while not (output.exists() and output.read_text().endswith("\n")):
        pass
    helper = psutil.Process(int(output.read_text().split()[-1]))
    cell = helper.parent()
    assert cell is not None
    assert os.getpgid(helper.pid) == cell.pid
    return [cell, helper]


def client_that_waits(command: tuple[str, ...], output: Path) -> tuple[subprocess.Popen[str], psutil.Process]:
    """A process that has asked for a cell and does nothing more; and its server."""
    code = f"""
        import sys
        from pathlib import Path
        from lm_profiler.processes.fork_server import CellServer
        server = CellServer({command!r})
        server.start("cell", [], Path({str(output)!r}), {{}})
        print("asked", flush=True)
        sys.stdin.read()
    """
    client = subprocess.Popen(
        (sys.executable, "-c", textwrap.dedent(code)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "asked\n"
    (server,) = psutil.Process(client.pid).children()
    return client, server


def kill(client: subprocess.Popen[str]) -> None:
    client.kill()
    client.communicate()


def test_a_cell_is_a_copy_of_what_has_loaded_the_modules(small: tuple[str, ...], tmp_path: Path) -> None:
    with CellServer(small) as server:
        server.start("cell", [], tmp_path / "out.txt", {})
        whole_group(tmp_path / "out.txt")
        assert (tmp_path / "out.txt").read_text().split()[:2] == ["False", "True"]
        server.signal("cell", 9)
        assert its_end(server) == CellEnded("cell", -9)


def test_what_a_cell_started_goes_when_the_cell_is_killed(small: tuple[str, ...], tmp_path: Path) -> None:
    with CellServer(small) as server:
        server.start("cell", [], tmp_path / "out.txt", {})
        group = whole_group(tmp_path / "out.txt")
        group[0].kill()
        assert psutil.wait_procs(group, timeout=60)[1] == []
        assert its_end(server) == CellEnded("cell", -9)


def test_what_a_cell_started_goes_when_the_server_is_killed(small: tuple[str, ...], tmp_path: Path) -> None:
    with CellServer(small) as server:
        server.start("cell", [], tmp_path / "out.txt", {})
        while CellStarted("cell") not in server.events(60):
            pass
        group = whole_group(tmp_path / "out.txt")
        program_of(server).kill()
        assert psutil.wait_procs(group[:1], timeout=60)[1] == []  # before this client has noticed anything
        (lost,) = server.events(60)
        assert isinstance(lost, CellEnded)
        assert (lost.cell, lost.code) == ("cell", None)
        assert_stored("processes/notes: a server killed amid a cell", {"reason": lost.lost or ""})
        assert psutil.wait_procs(group, timeout=60)[1] == []


def test_nothing_is_left_when_the_client_is_killed(small: tuple[str, ...], tmp_path: Path) -> None:
    client, server = client_that_waits(small, tmp_path / "out.txt")
    group = whole_group(tmp_path / "out.txt")
    kill(client)
    assert psutil.wait_procs([server, *group], timeout=60)[1] == []


def test_nothing_is_left_when_the_client_is_killed_amid_the_imports(small: tuple[str, ...], tmp_path: Path) -> None:
    client, server = client_that_waits((*small, "stuck"), tmp_path / "out.txt")
    kill(client)
    assert psutil.wait_procs([server], timeout=60)[1] == []


def test_a_client_does_not_wait_for_imports_that_nobody_needs(small: tuple[str, ...], tmp_path: Path) -> None:
    with CellServer((*small, "stuck")) as server:
        server.start("cell", [], tmp_path / "out.txt", {})
        program = program_of(server)
    assert not program.is_running()


DAEMON = """
import os, time
ready, told = os.pipe()
if os.fork() == 0:
    os.setsid()
    print(os.getpid(), flush=True)
    os.write(told, b"!")
    time.sleep(600)
os.read(ready, 1)  # before, it is of the cell's group, which ends with the cell
"""


@pytest.mark.parametrize("modules", [["loaded"], []], ids=["forked", "fresh"])
def test_a_daemon_that_a_cell_leaves_does_not_keep_the_folder(
    modules: list[str], small: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "daemon.py").write_text(DAEMON)
    lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    output = tmp_path / "out.txt"
    with CellServer((*SPAWNING[:-1], "daemon", *modules), lock) as server:
        server.start("cell", [], output, {})
        assert its_end(server) == CellEnded("cell", 0)
        daemon = psutil.Process(int(output.read_text()))
        os.close(lock)
        lock = os.open(tmp_path / "lock", os.O_RDWR)
        with pytest.raises(BlockingIOError):  # for as long as the server could start more
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        assert daemon.is_running()
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(lock)
        daemon.kill()
