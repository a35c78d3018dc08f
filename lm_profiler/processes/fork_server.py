"""The program that starts the cells of a sweep: ``python -m lm_profiler.processes.fork_server PROGRAM [MODULE ...]``.

Each cell is a process that runs ``python -m PROGRAM`` with the cell's arguments. Modules that are named are imported
once, must touch no device, and make each cell a fork of this process; without modules a cell is a fresh interpreter.
Requests and events go through the socket on stdin (``lm_profiler.processes.cell_server``).

How a cell ended is also written beside its output, in case the sweep is gone by then. When the socket is closed, for
whatever reason, every cell is killed: none outlives the sweep.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn

from lm_profiler.processes.cell_server import ENDED_FILE, CellEnded, CellStarted, SignalCell, StartCell
from lm_profiler.processes.child import die_with_parent
from lm_profiler.record.files import write_whole

_MOST_GIVEN = 1024  # descriptors that are looked at: the usual soft limit of open files


@dataclass
class _RunningCell:
    pid: int  # the process id, also that of the cell's process group
    output: Path
    began: float


class Server:
    """Starts cells, passes signals on, and reports when cells end. It keeps inherited descriptors open; cells do
    not."""

    def __init__(self, client: Connection, kept: Sequence[int] = ()) -> None:
        self._client, self._kept = client, kept
        self._running: dict[str, _RunningCell] = {}
        self._ended, self._wake = os.pipe()
        for end in (self._ended, self._wake):  # a full pipe must not block a signal
            os.set_blocking(end, False)

    def serve(self) -> StartCell | None:
        """Serve until the socket is closed, then return None; in a forked child return the cell that it is to run."""
        # The wake-up byte is written only for signals that have a Python handler.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        try:
            self._client.send(None)  # ready
            while True:
                ready = wait([self._client, self._ended])
                if self._ended in ready:
                    os.read(self._ended, 4096)
                    self._reap()
                if self._client in ready and (mine := self._follow(self._client.recv())):
                    return mine
        except (EOFError, OSError):  # who asked has gone
            return None
        finally:
            self._kill_all()

    def leave(self) -> None:
        """Close the server's descriptors in a forked child, whose own children must not keep the folder's lock."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._client.close()
        for end in (self._ended, self._wake, *self._kept):
            os.close(end)

    def _follow(self, request: StartCell | SignalCell) -> StartCell | None:
        """Carry out a request; in a forked child, return its cell."""
        if isinstance(request, SignalCell):
            self._signal(request.cell, request.number)
            return None
        try:
            with request.output.open("wb") as output:
                pid = _fork(output.fileno())
        except OSError as error:
            self._client.send(CellEnded(request.cell, None, f"could not be started: {error.strerror}"))
            return None
        if pid == 0:
            self._running.clear()  # or `_kill_all` would kill this child's siblings
            return request
        self._running[request.cell] = _RunningCell(pid, request.output, time.monotonic())
        self._client.send(CellStarted(request.cell, pid))
        return None

    def _signal(self, cell: str, number: int) -> None:
        if cell in self._running:
            with suppress(ProcessLookupError):
                os.killpg(self._running[cell].pid, number)

    def _reap(self) -> None:
        for name, cell in list(self._running.items()):
            pid, status = os.waitpid(cell.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                self._signal(name, signal.SIGKILL)  # what the cell left behind: workers, other ranks
                del self._running[name]
                ended = {"code": code, "duration_s": time.monotonic() - cell.began}
                with suppress(OSError):
                    write_whole(cell.output.with_name(ENDED_FILE), json.dumps(ended))
                self._client.send(CellEnded(name, code))

    def _kill_all(self) -> None:
        for cell in self._running:
            self._signal(cell, signal.SIGKILL)
        for running in self._running.values():
            os.waitpid(running.pid, 0)


def _given() -> list[int]:
    """Return the inherited descriptors beyond the first three; those that Python opens are not inheritable."""
    given = []
    for each in range(3, _MOST_GIVEN):
        with suppress(OSError):
            if os.get_inheritable(each):
                given.append(each)
    return given


def _fork(output: int) -> int:
    """Fork a child that leads a process group and prints into ``output``; return its pid, and 0 in the child."""
    torch = sys.modules.get("torch")
    assert torch is None or not torch.cuda.is_initialized(), "a device that was touched is of no use to children"
    pid = os.fork()
    with suppress(OSError):  # in both processes, so that neither goes on before the group exists
        os.setpgid(pid, pid)
    if pid == 0:
        for end in (1, 2):
            os.dup2(output, end)
    return pid


def _become(cell: StartCell, program: str, afresh: bool, server_pid: int) -> int:
    """Run the cell in this forked child, and return its exit code.

    ``afresh``: whether a new interpreter takes the child's place; then this does not return.
    """
    die_with_parent()
    if os.getppid() != server_pid:  # the server died before `die_with_parent` took effect
        os._exit(1)
    with suppress(OSError):  # where memory runs out, the kernel shall kill the cell and not the sweep
        Path("/proc/self/oom_score_adj").write_text("500")
    os.environ.update(cell.environment)
    if afresh:
        os.execv(sys.executable, (sys.executable, "-m", program, *cell.arguments))
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # or every cell would have the server's state; torch seeds itself alike in every process
    sys.argv = [program, *cell.arguments]
    try:
        # It sets sys.argv and __main__, by which the cell starts further processes, such as DDP's ranks.
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, int):
            return end.code
        raise
    return 0


def _import(modules: Sequence[str], client: Connection) -> None:
    """Import once what every cell needs, without touching a device or computing: both would start threads."""
    die_with_parent()  # while importing, nobody notices that the socket was closed
    gone = select.poll()
    gone.register(client, 0)  # reports only that the other end was closed
    if gone.poll(0):
        os._exit(0)
    for module in modules:
        import_module(module)
    die_with_parent(False)  # from here on `serve` notices, and kills the cells first


def _end(code: int) -> NoReturn:
    """End as an interpreter does, but without freeing every object: that would copy each page shared with the
    server."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def main() -> int:
    """Serve; in a forked child, run its cell."""
    program, *modules = sys.argv[1:]
    kept = _given()
    client, nothing = Connection(os.dup(0)), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    if modules:
        _import(modules, client)
    server, pid = Server(client, kept), os.getpid()
    cell = server.serve()
    if cell is not None:
        server.leave()
        _end(_become(cell, program, not modules, pid))
    return 0


if __name__ == "__main__":
    sys.exit(main())
