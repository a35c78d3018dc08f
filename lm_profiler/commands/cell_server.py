"""The program that starts the cells of a sweep: ``python -m lm_profiler.commands.cell_server [--spawn]``.

It imports torch and Lightning once, touches no device, and forks a process for each cell. With ``--spawn`` it imports
neither, and each cell is a fresh interpreter. Requests come in as lines of JSON, and so do answers go out:

    {"start": id, "arguments": [...], "output": path, "environment": {...}}   {"started": id, "pid": n}
                                                                              {"ended": id, "code": n, "lost": why}
    {"signal": number, "cell": id}

The end of a cell is also written beside its output, for the case that nobody hears the answer. When the requests end,
for whatever reason, every cell is killed: none outlives the sweep.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from lm_profiler.cli.quiet import quiet_libraries
from lm_profiler.record.files import write_whole
from lm_profiler.sweep.outcome import ENDED_FILE

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_Request = dict[str, Any]


class Process(Protocol):
    """A cell's process, the leader of a group of its own."""

    pid: int

    def poll(self) -> int | None:
        """Its exit code, negative for the signal that killed it; None while it runs."""


class Forked:
    """A child of ``os.fork``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None


@dataclass
class _Cell:
    process: Process
    output: Path
    began: float


class Server:
    """Starts cells, hands signals on, and tells when cells end."""

    def __init__(self, requests: int, answers: int, fork: bool) -> None:
        self._requests, self._answers, self._fork = requests, answers, fork
        self._running: dict[str, _Cell] = {}
        self._ended, self._wake = os.pipe()
        for end in (self._ended, self._wake):
            os.set_blocking(end, False)

    def serve(self) -> _Request | None:
        """None when the requests have ended; in a forked child, the request that it is to run."""
        # With no handler of Python's, the wake-up byte would not be written.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        try:
            self._answer(ready=os.getpid())
            for request in self._read():
                if "signal" in request:
                    self._signal(request["cell"], request["signal"])
                elif self._start(request):
                    self._running.clear()  # its siblings are none of its business
                    return request
            return None
        finally:
            self._kill_all()

    def leave(self) -> None:
        """Be no server any more, in a forked child."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self._requests, self._answers, self._ended, self._wake):
            os.close(end)

    def _read(self) -> Iterator[_Request]:
        """Each request as it comes; in between, cells that ended are told."""
        rest = b""
        while True:
            ready, _, _ = select.select([self._requests, self._ended], [], [])
            if self._ended in ready:
                os.read(self._ended, 4096)
                self._reap()
            if self._requests in ready:
                chunk = os.read(self._requests, 1 << 16)
                if not chunk:
                    return
                *lines, rest = (rest + chunk).split(b"\n")
                yield from map(json.loads, lines)

    def _answer(self, **answer: Any) -> None:
        os.write(self._answers, json.dumps(answer).encode() + b"\n")

    def _start(self, request: _Request) -> bool:
        """Whether this is now the child."""
        try:
            process = fork() if self._fork else spawn(request)
        except OSError as error:
            self._answer(ended=request["start"], code=None, lost=f"could not be started: {error.strerror}")
            return False
        if process is None:
            return True
        self._running[request["start"]] = _Cell(process, Path(request["output"]), time.monotonic())
        self._answer(started=request["start"], pid=process.pid)
        return False

    def _signal(self, cell: str, number: int) -> None:
        if cell in self._running:
            with suppress(ProcessLookupError):
                os.killpg(self._running[cell].process.pid, number)

    def _reap(self) -> None:
        for name, cell in list(self._running.items()):
            code = cell.process.poll()
            if code is not None:
                self._signal(name, signal.SIGKILL)  # what it left behind: workers, other ranks
                del self._running[name]
                ended = {"code": code, "duration_s": time.monotonic() - cell.began}
                with suppress(OSError):
                    write_whole(cell.output.with_name(ENDED_FILE), json.dumps(ended))
                self._answer(ended=name, code=code, lost=None)

    def _kill_all(self) -> None:
        for cell in self._running:
            self._signal(cell, signal.SIGKILL)
        for running in self._running.values():
            while running.process.poll() is None:
                time.sleep(0.01)


def fork() -> Process | None:
    """A child in a group of its own; None in that child."""
    import torch

    assert not torch.cuda.is_initialized(), "a device that the server has touched is of no use to its children"
    pid = os.fork()
    with suppress(OSError):  # in both, so that neither goes on before it is done
        os.setpgid(pid, pid)
    return Forked(pid) if pid else None


def spawn(request: _Request) -> Process:
    """A fresh interpreter in a group of its own."""
    with open(request["output"], "wb") as output:  # noqa: PTH123 - a path of bytes would do, too
        return subprocess.Popen(
            (sys.executable, "-m", "lm_profiler", *request["arguments"]),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **request["environment"]},
            start_new_session=True,
        )


def become(request: _Request, server_pid: int) -> int:
    """Run the cell in this forked child as a process of its own would; returns the exit code."""
    import numpy as np

    import lm_profiler.__main__ as program

    _die_with(server_pid)
    with open(request["output"], "wb") as output:  # noqa: PTH123 - see spawn
        for end in (1, 2):
            os.dup2(output.fileno(), end)
    os.environ.update(request["environment"])
    np.random.seed()  # the state is the server's, the same in every cell; torch's is the same in every process anyway
    # Processes that the cell starts, ranks of DDP say, are started by what these name.
    sys.argv = [str(program.__file__), *request["arguments"]]
    sys.modules["__main__"] = program
    return program.main(request["arguments"])


def _die_with(server_pid: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server_pid:  # it died before
            os._exit(1)
        with suppress(OSError):  # where memory runs out, the system shall take the cell and not the sweep
            Path("/proc/self/oom_score_adj").write_text("500")


def main() -> int:
    """Serve; in a forked child, run its cell."""
    forks = "--spawn" not in sys.argv[1:]
    # What libraries print goes to stderr: stdout is for answers.
    requests, answers, nothing = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    if forks:
        with _ending_with(requests):
            _import_everything()
    server, pid = Server(requests, answers, forks), os.getpid()
    with suppress(BrokenPipeError):  # who asked is gone
        request = server.serve()
        if request is not None:
            server.leave()
            _end(become(request, pid))
    return 0


@contextmanager
def _ending_with(requests: int) -> Iterator[None]:
    """End this process as soon as nobody can ask any more: who was killed meanwhile leaves nobody behind."""
    ready = threading.Event()

    def watch() -> None:
        asks = select.poll()
        asks.register(requests, 0)  # no event but that the other end is closed
        while not ready.is_set():
            if asks.poll(100):
                os._exit(0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        ready.set()
        watcher.join()  # a process that is forked has one thread


def _import_everything() -> None:
    """What every cell needs, once; no device is touched, and nothing computed: both start threads."""
    quiet_libraries()
    import torch.utils.tensorboard  # noqa: F401 - the logger's, late otherwise

    import lm_profiler.cli.trainer_verbs  # noqa: F401


def _end(code: int) -> NoReturn:
    """End as an interpreter does, but for taking every object apart: that copies each page that the server shares."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
