"""Starts the cells of a sweep, each in a process of its own, and reports when they end.

A cell runs ``python -m PROGRAM`` with its arguments and leads a process group. It is a fork of multiprocessing's fork
server, which imports some modules once for all cells; or a fresh interpreter if no modules are named.

No cell outlives the sweep: if this process dies, another process, the cleaner, kills the groups that are left.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

from lm_profiler.processes.child import die_with_parent

# Environment variables of the server. torch reads the first two once, when it is imported; the third keeps it from
# opening the GPU.
_SERVER_VARIABLES = {
    "KINETO_LOG_LEVEL": "99",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}

# How often it is checked whether a cell has ended: a fresh interpreter shares the pipe that shows its end with its
# children, which may outlive it.
_POLL_S = 0.1

_SERVER_DIED = 255  # the exit code that multiprocessing reports if its server died

# The program of the cleaner, which kills the cells that still run when this process ends: then its stdin is closed.
# Each line of stdin is the leader of a cell's process group, once when the cell begins and again when it has ended.
_CLEANER = """
import os, signal, sys
leaders = set()
for line in sys.stdin:
    leaders ^= {int(line)}
for leader in leaders:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


@dataclass(frozen=True)
class CellEnded:
    """A cell whose process has ended."""

    cell: str
    code: int | None  # the exit code; None if it is unknown
    lost: str | None = None  # why the exit code is unknown


class CellProcesses:
    """The processes of cells that run ``program``.

    The file descriptor ``lock`` stays open until the last cell has ended; cells do not inherit it.
    """

    def __init__(
        self, program: str, modules: Sequence[str] = (), lock: int | None = None
    ) -> None:
        self._program = program
        self._modules = list(modules)
        self._lock = lock
        # starts processes: as fresh interpreters, or through a fork server
        self._context: Any = multiprocessing.get_context("spawn")
        if modules:
            self._context = multiprocessing.get_context("forkserver")
        self._running: dict[str, Any] = {}  # the process of each cell that runs
        # cells whose process could not be started
        self._not_started: list[CellEnded] = []

    def __enter__(self) -> CellProcesses:
        """Start the cleaner: a process that kills the cells if this process dies without ``__exit__``."""
        # The cleaner has the lock open too, because it may be the last to end a cell.
        kept_descriptors = [] if self._lock is None else [self._lock]
        self._cleaner = subprocess.Popen(
            [sys.executable, "-c", _CLEANER],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=kept_descriptors,
            start_new_session=True,  # so that Ctrl-C in the terminal does not reach it
            bufsize=0,
        )
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the cells, and wait until all processes have ended."""
        for cell in list(self._running):
            self.signal(cell, signal.SIGKILL)
            self._end(cell)
        self._cleaner.communicate()

    def start(
        self,
        cell: str,
        arguments: Sequence[str],
        output: Path,
        environment: Mapping[str, str],
    ) -> None:
        """Start a cell that prints into ``output``; the first one waits for the imports of the server."""
        if self._modules:
            for name, text in _SERVER_VARIABLES.items():
                os.environ.setdefault(name, text)
            self._context.set_forkserver_preload(self._modules)
        process = self._context.Process(
            target=run_cell,
            args=(self._program, list(arguments), str(output), dict(environment)),
        )
        try:
            output.write_bytes(b"")
            process.start()
        except OSError as error:
            reason = f"could not be started: {error.strerror}"
            self._not_started.append(CellEnded(cell, code=None, lost=reason))
            return
        self._running[cell] = process
        self._send_to_cleaner(process.pid)

    def signal(self, cell: str, number: int) -> None:
        """Send the signal ``number`` to a cell and its children, if it still runs."""
        if cell not in self._running:
            return
        pid = self._running[cell].pid
        with suppress(ProcessLookupError):
            try:
                os.killpg(pid, number)
            except ProcessLookupError:  # it does not lead a group yet
                os.kill(pid, number)

    def wait_for_ends(self, timeout_s: float | None) -> list[CellEnded]:
        """Wait until a cell ends, ``timeout_s`` at most, and return the cells that have ended."""
        deadline_s = inf
        if timeout_s is not None:
            deadline_s = time.monotonic() + timeout_s
        while True:
            ended = self._not_started
            self._not_started = []
            for cell, process in list(self._running.items()):
                if process.exitcode is not None:
                    ended.append(self._end(cell))
            seconds_left = deadline_s - time.monotonic()
            if ended or seconds_left <= 0.0 or not self._running:
                return ended
            sentinels = [process.sentinel for process in self._running.values()]
            wait(sentinels, min(seconds_left, _POLL_S))

    def _end(self, cell: str) -> CellEnded:
        """Wait for the end of a cell, and kill processes that it left behind, such as workers and other ranks."""
        process = self._running.pop(cell)
        process.join()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        self._send_to_cleaner(process.pid)
        code: int = process.exitcode
        process.close()
        has_server = bool(self._modules)
        if has_server and code == _SERVER_DIED:
            return CellEnded(cell, code=None, lost="the process that starts cells died")
        return CellEnded(cell, code)

    def _send_to_cleaner(self, pid: int) -> None:
        """Report to the cleaner that the group of ``pid`` has begun, or that it has ended."""
        assert self._cleaner.stdin is not None
        with suppress(BrokenPipeError):  # the cleaner was killed
            self._cleaner.stdin.write(f"{pid}\n".encode())


# -- in a cell's process -----------------------------------------------------------------------------------------------


def run_cell(
    program: str, arguments: list[str], output: str, environment: dict[str, str]
) -> NoReturn:
    """Run the cell in this process as ``python -m`` would, and end the process."""
    # Excludes what the server has loaded from garbage collections, which would copy its pages.
    gc.freeze()
    os.setpgid(0, 0)
    die_with_parent()
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    with suppress(OSError):
        # If memory runs out, the kernel should kill the cell and not the sweep.
        Path("/proc/self/oom_score_adj").write_text("500")
    os.environ.update(environment)
    multiprocessing.set_start_method(None, force=True)  # back to Python's default
    forget_server()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        # Otherwise every cell would have the server's random state. (torch's seed is the same in every process.)
        numpy.random.seed()
    sys.argv = [program, *arguments]
    code = 0
    try:
        # This sets sys.argv and __main__, which the cell needs to start further processes, such as DDP's ranks.
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as exit_request:
        code = _exit_code(exit_request)
    except BaseException:
        traceback.print_exc()
        code = 1
    _exit(code)


def forget_server() -> None:
    """Close the cell's link to the server, which processes that the cell leaves behind would otherwise keep alive.

    If the cell needs a fork server, it gets its own.
    """
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server.__init__()  # as if no server had been started


def _exit_code(exit_request: SystemExit) -> int:
    """Return the exit code; if there is a message instead, print it and return 1, as an interpreter does."""
    if exit_request.code is None:
        return 0
    if isinstance(exit_request.code, int):
        return exit_request.code
    print(exit_request.code, file=sys.stderr)
    return 1


def _exit(code: int) -> NoReturn:
    """End as an interpreter does, but without freeing all objects, because that would copy the server's pages."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
