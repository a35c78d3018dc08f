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

from lm_profiler.processes.child import die_with_parent, end_text

_PATIENCE_S = 10.0  # seconds for the program to end by itself before it is killed
# torch reads them once, when it is imported
_QUIET = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
_LOCK = "LM_PROFILER_LOCK"  # the variable with the descriptor of the folder's lock, for the program


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
    """Event: the process of a cell has ended; ``lost`` is the reason if its exit code is unknown."""

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
        self._command = command
        self._lock = lock
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
            patience_s = _PATIENCE_S if self._ready else 0.0
            self._wait_or_kill(self._process, patience_s)

    def start(
        self,
        cell: str,
        arguments: Sequence[str],
        output: Path,
        environment: Mapping[str, str],
    ) -> None:
        if self._process is None:
            self._process = self._launch()
        self._pids[cell] = None
        self._send(StartCell(cell, arguments, output, environment))

    def signal(self, cell: str, number: int) -> None:
        if self._process is not None:
            self._send(SignalCell(cell, number))

    def events(self, timeout_s: float | None) -> list[CellStarted | CellEnded]:
        """Return what has happened; wait for an event, ``timeout_s`` at most.

        Raises ServerError if the program died before it was ready.
        """
        if self._process is None or not self._link.poll(timeout_s):
            return []
        try:
            event: CellStarted | CellEnded | None = self._link.recv()
        except (EOFError, OSError):
            return self._end_lost_cells(self._process)
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
        self._link, program_end = Pipe()
        environment = dict(_QUIET)
        environment.update(os.environ)
        # Lightning sets this as well: without it, torch.cuda.is_available() would open the GPU.
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        kept_descriptors = []
        if self._lock is not None:
            environment[_LOCK] = str(self._lock)
            kept_descriptors = [self._lock]
        with program_end:
            return subprocess.Popen(
                self._command,
                stdin=program_end.fileno(),
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=kept_descriptors,
                start_new_session=True,  # Ctrl-C in the terminal goes to the sweep, which lets its cells end
            )

    def _send(self, request: StartCell | SignalCell) -> None:
        with suppress(OSError):  # the program died: `events` reports it
            self._link.send(request)

    def _end_lost_cells(
        self, process: subprocess.Popen[bytes]
    ) -> list[CellStarted | CellEnded]:
        """Kill the remaining processes of the cells after the program died, and report each cell as ended.

        The cells die with the program (``die_with_parent``), but the processes that they started do not.
        """
        self._process = None
        for pid in self._pids.values():
            if pid is not None:
                _kill_group(pid)
        last_line = self._wait_or_kill(process, _PATIENCE_S)
        reason = f"the process that starts cells died ({end_text(process.returncode)})"
        if not self._ready:
            if last_line:
                reason += f": {last_line}"
            raise ServerError(reason)
        events: list[CellStarted | CellEnded] = [
            CellEnded(cell, None, reason) for cell in self._pids
        ]
        self._pids.clear()
        return events

    def _wait_or_kill(self, process: subprocess.Popen[bytes], patience_s: float) -> str:
        """Wait for the end of the program or kill it; return the last line that it printed."""
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
        process.kill()
        process.wait()
        self._link.close()
        with self._output as file:
            file.seek(0)
            lines = file.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


def _kill_group(pid: int, patience_s: float = 1.0) -> None:
    """Kill a process group again and again, since a member may fork while it is being killed."""
    deadline = time.monotonic() + patience_s
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(pid, signal.SIGKILL)
            time.sleep(0.01)


# -- the program -------------------------------------------------------------------------------------------------------


class Server:
    """Starts cells, passes signals on, and reports when cells end; it keeps ``lock`` open, and cells do not."""

    def __init__(self, client: Connection, lock: str | None) -> None:
        self._client = client
        self._lock = lock
        # the pid of each cell, which is also that of its process group
        self._running: dict[str, int] = {}
        # gets a byte when a child ends
        self._wakeup_reader, self._wakeup_writer = os.pipe()
        for pipe_end in (self._wakeup_reader, self._wakeup_writer):
            # a full pipe must not block a signal
            os.set_blocking(pipe_end, False)

    def serve(self) -> StartCell | None:
        """Serve until the socket is closed, then return None; in a forked child return the cell that it is to run."""
        # The wake-up byte is written only for signals that have a Python handler.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_writer, warn_on_full_buffer=False)
        try:
            self._client.send(None)  # ready
            while True:
                ready = wait([self._client, self._wakeup_reader])
                if self._wakeup_reader in ready:
                    os.read(self._wakeup_reader, 4096)
                    self._report_ended_cells()
                if self._client not in ready:
                    continue
                cell_to_run = self._handle(self._client.recv())
                if cell_to_run is not None:  # in the child
                    return cell_to_run
        except (EOFError, OSError):  # the client has gone
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
        os.close(self._wakeup_reader)
        os.close(self._wakeup_writer)
        if self._lock is not None:
            os.close(int(self._lock))

    def _handle(self, request: StartCell | SignalCell) -> StartCell | None:
        """Do what the client asks for; in a forked child return the cell that it is to run, else None."""
        if isinstance(request, SignalCell):
            self._signal(request.cell, request.number)
            return None
        try:
            with request.output.open("wb") as output:
                pid = _fork(output.fileno())
        except OSError as error:
            self._client.send(
                CellEnded(request.cell, None, f"could not be started: {error.strerror}")
            )
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

    def _report_ended_cells(self) -> None:
        for cell, pid in list(self._running.items()):
            ended_pid, status = os.waitpid(pid, os.WNOHANG)
            if ended_pid == 0:  # it still runs
                continue
            # processes that the cell left behind: workers, other ranks
            self._signal(cell, signal.SIGKILL)
            del self._running[cell]
            self._client.send(CellEnded(cell, os.waitstatus_to_exitcode(status)))


def _fork(output: int) -> int:
    """Fork a child that leads a process group and prints into ``output``; return its pid, and 0 in the child."""
    torch = sys.modules.get("torch")
    assert torch is None or not torch.cuda.is_initialized(), (
        "children cannot use a device that was opened"
    )
    pid = os.fork()
    with suppress(OSError):
        # in both processes, so that neither continues before the group exists
        os.setpgid(pid, pid)
    if pid == 0:
        for stream in (1, 2):
            os.dup2(output, stream)
    return pid


def _run_cell(
    cell: StartCell, program: str, in_new_interpreter: bool, server_pid: int
) -> int:
    """Run the cell in this forked child, or in a new interpreter in its place, and return its exit code."""
    die_with_parent()
    if os.getppid() != server_pid:
        # the server died before `die_with_parent` took effect
        os._exit(1)
    with suppress(OSError):
        # if memory runs out, the kernel must kill the cell, not the sweep
        Path("/proc/self/oom_score_adj").write_text("500")
    os.environ.update(cell.environment)
    if in_new_interpreter:
        os.execv(sys.executable, (sys.executable, "-m", program, *cell.arguments))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # otherwise every cell has the server's state; torch's seed is always the same
    sys.argv = [program, *cell.arguments]
    try:
        # It sets sys.argv and __main__, by which the cell starts further processes, such as DDP's ranks.
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as exit_request:
        if isinstance(exit_request.code, int):
            return exit_request.code
        raise
    return 0


def _import(modules: Sequence[str], client: Connection) -> None:
    """Import once what every cell needs, without touching a device or computing: both would start threads."""
    die_with_parent()  # while importing, nobody notices that the socket was closed
    closing = select.poll()
    closing.register(client, 0)  # reports only that the other end was closed
    if closing.poll(0):
        os._exit(0)
    for module in modules:
        import_module(module)
    # from here on `serve` notices, and kills the cells first
    die_with_parent(begin=False)


def _exit(code: int) -> NoReturn:
    """End as an interpreter does, but without freeing all objects, which would copy pages shared with the server."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def main() -> int:
    program, *modules = sys.argv[1:]
    client = Connection(os.dup(0))
    empty_input = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty_input, 0)
    os.close(empty_input)
    if modules:
        _import(modules, client)
    server = Server(client, os.environ.pop(_LOCK, None))
    server_pid = os.getpid()
    cell = server.serve()
    if cell is not None:
        server.leave()
        code = _run_cell(
            cell, program, in_new_interpreter=not modules, server_pid=server_pid
        )
        _exit(code)
    return 0


if __name__ == "__main__":
    # main() of the module under its own name: sent objects must have the classes that the client knows.
    sys.exit(import_module("lm_profiler.processes.fork_server").main())
