"""The client of the fork server: starts that program, sends it requests, reads its events, and ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO

from lm_profiler.processes.child import how_ended

_PATIENCE_S = 10.0  # seconds that the program has to end by itself before it is killed

ENDED_FILE = "ended.json"  # the file beside a cell's output that tells how the cell ended

_QUIET = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # torch reads them once, when it is imported


@dataclass(frozen=True)
class StartCell:
    """Request to start the process of a cell, which prints into ``output``."""

    cell: str
    arguments: Sequence[str]
    output: Path
    environment: Mapping[str, str]


@dataclass(frozen=True)
class SignalCell:
    """Request to send a signal to all processes of a cell, if it runs."""

    cell: str
    number: int


@dataclass(frozen=True)
class CellStarted:
    """Event: the process of a cell runs, and leads a process group with its ``pid``."""

    cell: str
    pid: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class CellEnded:
    """Event: the process of a cell has ended; ``lost`` says why its exit code is unknown, if it is."""

    cell: str
    code: int | None
    lost: str | None = None


class ServerError(RuntimeError):
    """The program that starts cells died before it was ready; the message has the last line that it printed."""


class CellServer:
    """Starts the program when a cell is first asked for, and again if it has died.

    Args:
        command: The program with its arguments. Its stdin is a socket for requests and events.
        lock: A descriptor that the program keeps open as long as a cell runs, and that cells do not inherit.
    """

    _link: Connection  # the connection to the process, while there is one

    def __init__(self, command: Sequence[str], lock: int | None = None) -> None:
        self._command, self._lock = command, lock
        self._process: subprocess.Popen[bytes] | None = None
        self._pids: dict[str, int | None] = {}
        """The pid of each cell that was asked for and has not ended; None until it has started."""

    def __enter__(self) -> CellServer:
        return self

    def __exit__(self, *_: object) -> None:
        """End the program, which kills its cells, and wait until it is gone."""
        if self._process is not None:
            self._link.close()
            # Before it is ready it has no cells to kill, and imports for seconds.
            self._wait_or_kill(self._process, _PATIENCE_S if self._ready else 0.0)

    def start(self, cell: str, arguments: Sequence[str], output: Path, environment: Mapping[str, str]) -> None:
        """Ask for the process of ``cell``; ``events`` tells when it has started."""
        if self._process is None:
            self._process = self._launch()
        self._pids[cell] = None
        self._send(StartCell(cell, arguments, output, environment))

    def signal(self, cell: str, number: int) -> None:
        """Send a signal to all processes of ``cell``, if it runs."""
        if self._process is not None:
            self._send(SignalCell(cell, number))

    def events(self, timeout_s: float | None) -> list[CellStarted | CellEnded]:
        """Return what has happened; wait for an event, ``timeout_s`` at most.

        Raises:
            ServerError: the program died before it was ready.
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
        with theirs:
            return subprocess.Popen(
                self._command,
                stdin=theirs.fileno(),
                stdout=self._output,
                stderr=subprocess.STDOUT,
                # Lightning sets the last one as well: without it, torch.cuda.is_available() would open the GPU.
                env={**_QUIET, **os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
                pass_fds=() if self._lock is None else (self._lock,),
                start_new_session=True,  # Ctrl-C in the terminal is for the sweep, which lets its cells end
            )

    def _send(self, request: StartCell | SignalCell) -> None:
        with suppress(OSError):  # the program died: `events` will tell
            self._link.send(request)

    def _died(self, process: subprocess.Popen[bytes]) -> list[CellStarted | CellEnded]:
        """Kill what is left of the cells, and report each one as ended.

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
