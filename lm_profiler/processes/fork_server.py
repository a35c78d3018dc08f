"""A server that starts the cells of a sweep, and its client.

``python -m lm_profiler.processes.fork_server PROGRAM [MODULE ...]`` is the program. Each cell is a process that runs
``python -m PROGRAM`` with the cell's arguments. Modules that are named are imported once, must touch no device, and
make each cell a fork of the server; without modules a cell is a fresh interpreter.

When the socket on stdin is closed, for whatever reason, every cell is killed: none outlives the sweep.
"""

from __future__ import annotations

import atexit
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import IO, NoReturn

from lm_profiler.processes.child import die_with_parent, how_ended

_PATIENCE_S = 10.0  # seconds for the program to end by itself before it is killed
_QUIET = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # torch reads them once, when it is imported
_LOCK = "LM_PROFILER_LOCK"  # the variable that tells the program the descriptor of the folder's lock


@dataclass(frozen=True)
class StartCell:
    cell: str
    arguments: Sequence[str]
    output: Path
    environment: Mapping[str, str]


@dataclass(frozen=True)
class SignalCell:
    cell: str
    number: int


@dataclass(frozen=True)
class CellStarted:
    cell: str
    pid: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class CellEnded:
    """Event: the process of a cell has ended; ``lost`` says why its exit code is unknown, if it is."""

    cell: str
    code: int | None
    lost: str | None = None


# -- the client --------------------------------------------------------------------------------------------------------


class ServerError(RuntimeError):
    """The program that starts cells died before it was ready; the message has the last line that it printed."""


class CellServer:
    """Starts the program ``command`` when a cell is first asked for, and again if it has died.

    The program keeps the descriptor ``lock`` open as long as a cell runs; cells do not inherit it.
    """

    _link: Connection  # the connection to the process, while there is one

    def __init__(self, command: Sequence[str], lock: int | None = None) -> None:
        self._command, self._lock = command, lock
        self._process: subprocess.Popen[bytes] | None = None
        # the pid of each cell that was asked for and has not ended; None until it has started
        self._pids: dict[str, int | None] = {}

    def __enter__(self) -> CellServer:
        return self

    def __exit__(self, *_: object) -> None:
        """End the program, which kills its cells, and wait until it is gone."""
        if self._process is not None:
            self._link.close()
            # Before it is ready it has no cells to kill, and still imports for seconds.
            self._wait_or_kill(self._process, _PATIENCE_S if self._ready else 0.0)

    def start(self, cell: str, arguments: Sequence[str], output: Path, environment: Mapping[str, str]) -> None:
        if self._process is None:
            self._process = self._launch()
        self._pids[cell] = None
        self._send(StartCell(cell, arguments, output, environment))

    def signal(self, cell: str, number: int) -> None:
        if self._process is not None:
            self._send(SignalCell(cell, number))

    def events(self, timeout_s: float | None) -> list[CellStarted | CellEnded]:
        """Return what has happened; wait for an event, ``timeout_s`` at most.

        Raises ServerError where the program died before it was ready.
        """
        if self._process is None or not self._link.poll(timeout_s):
            return []
        try:
            event: CellStarted | CellEnded | None = self._link.recv()
        except (EOFError, OSError):
            return self._died(self._process)
        self._ready = True
        if event is None:
            return []
        if isinstance(event, CellStarted):
            self._pids[event.cell] = event.pid
        else:
            self._pids.pop(event.cell, None)
        return [event]

    def _launch(self) -> subprocess.Popen[bytes]:
        # A file: a pipe that nobody reads would fill up and block the program.
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._ready = False
        self._link, theirs = Pipe()
        lock = {} if self._lock is None else {_LOCK: str(self._lock)}
        with theirs:
            return subprocess.Popen(
                self._command,
                stdin=theirs.fileno(),
                stdout=self._output,
                stderr=subprocess.STDOUT,
                # Lightning sets the last one as well: without it, torch.cuda.is_available() would open the GPU.
                env={**_QUIET, **os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1", **lock},
                pass_fds=[*map(int, lock.values())],
                start_new_session=True,  # Ctrl-C in the terminal goes to the sweep, which lets its cells end
            )

    def _send(self, request: StartCell | SignalCell) -> None:
        with suppress(OSError):  # the program died: `events` reports it
            self._link.send(request)

    def _died(self, process: subprocess.Popen[bytes]) -> list[CellStarted | CellEnded]:
        """Kill the remaining processes of the cells, and report each cell as ended.

        The cells die with the program (``die_with_parent``), but the processes that they started do not.
        """
        self._process = None
        for pid in filter(None, self._pids.values()):
            _kill_group(pid)
        said = self._wait_or_kill(process, _PATIENCE_S)
        how = f"the process that starts cells died ({how_ended(process.returncode)})"
        if not self._ready:
            raise ServerError(f"{how}: {said}" if said else how)
        lost = [CellEnded(cell, None, how) for cell in self._pids]
        self._pids.clear()
        return [*lost]

    def _wait_or_kill(self, process: subprocess.Popen[bytes], patience_s: float) -> str:
        """Wait for the end of the program or kill it; return the last line that it printed."""
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
        process.kill()
        process.wait()
        self._link.close()
        with self._output as said:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


def _kill_group(pid: int, patience_s: float = 1.0) -> None:
    """Kill a process group again and again, since a member may fork while it is being killed."""
    until = time.monotonic() + patience_s
    with suppress(ProcessLookupError):
        while time.monotonic() < until:
            os.killpg(pid, signal.SIGKILL)
            time.sleep(0.01)


# -- the program -------------------------------------------------------------------------------------------------------


class Server:
    """Starts cells, passes signals on, and reports when cells end; it keeps ``lock`` open, and cells do not."""

    def __init__(self, client: Connection, lock: str | None) -> None:
        self._client, self._lock = client, lock
        self._running: dict[str, int] = {}  # the pid of each cell, which is also that of its process group
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
            for cell in self._running:
                self._signal(cell, signal.SIGKILL)
            for pid in self._running.values():
                os.waitpid(pid, 0)

    def leave(self) -> None:
        """Close the server's descriptors in a forked child, whose own children must not keep the folder's lock."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._client.close()
        for end in (self._ended, self._wake, *([] if self._lock is None else [int(self._lock)])):
            os.close(end)

    def _follow(self, request: StartCell | SignalCell) -> StartCell | None:
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
            self._running.clear()  # or `serve` would kill this child's siblings
            return request
        self._running[request.cell] = pid
        self._client.send(CellStarted(request.cell, pid))
        return None

    def _signal(self, cell: str, number: int) -> None:
        if cell in self._running:
            with suppress(ProcessLookupError):
                os.killpg(self._running[cell], number)

    def _reap(self) -> None:
        for cell, pid in list(self._running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._signal(cell, signal.SIGKILL)  # processes that the cell left behind: workers, other ranks
                del self._running[cell]
                self._client.send(CellEnded(cell, os.waitstatus_to_exitcode(status)))


def _fork(output: int) -> int:
    """Fork a child that leads a process group and prints into ``output``; return its pid, and 0 in the child."""
    torch = sys.modules.get("torch")
    assert torch is None or not torch.cuda.is_initialized(), "children cannot use a device that was opened"
    pid = os.fork()
    with suppress(OSError):  # in both processes, so that neither continues before the group exists
        os.setpgid(pid, pid)
    if pid == 0:
        for end in (1, 2):
            os.dup2(output, end)
    return pid


def _become(cell: StartCell, program: str, afresh: bool, server_pid: int) -> int:
    """Run the cell in this forked child, and return its exit code; ``afresh`` by a new interpreter in its place."""
    die_with_parent()
    if os.getppid() != server_pid:  # the server died before `die_with_parent` took effect
        os._exit(1)
    with suppress(OSError):  # if memory runs out, the kernel must kill the cell, not the sweep
        Path("/proc/self/oom_score_adj").write_text("500")
    os.environ.update(cell.environment)
    if afresh:
        os.execv(sys.executable, (sys.executable, "-m", program, *cell.arguments))
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # otherwise every cell has the server's state; torch's seed is always the same
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
    """End as an interpreter does, but without freeing all objects, which would copy pages shared with the server."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def main() -> int:
    program, *modules = sys.argv[1:]
    client, nothing = Connection(os.dup(0)), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    if modules:
        _import(modules, client)
    server, pid = Server(client, os.environ.pop(_LOCK, None)), os.getpid()
    cell = server.serve()
    if cell is not None:
        server.leave()
        _end(_become(cell, program, not modules, pid))
    return 0


if __name__ == "__main__":
    # main() of the module under its own name: sent objects must have the classes that the client knows.
    sys.exit(import_module("lm_profiler.processes.fork_server").main())
