"""The other end of the program that starts cells: asks it, hears from it, starts it again, and ends it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

_PATIENCE_S = 10.0


@dataclass(frozen=True)
class CellStarted:
    """The process of a cell runs."""

    cell: str


@dataclass(frozen=True)
class CellEnded:
    """The process of a cell has ended; ``lost`` says why its exit code is unknown, if it is."""

    cell: str
    code: int | None
    lost: str | None = None


class ServerError(RuntimeError):
    """The program that starts cells does not work at all; the message is what it said last."""


class CellServer:
    """Starts the program where it is needed, and again where it died.

    Args:
        command: The program with its arguments; it speaks JSON lines on stdin and stdout.
        lock: A descriptor that it keeps open for as long as any cell runs.
    """

    def __init__(self, command: Sequence[str], lock: int | None = None) -> None:
        self._command, self._lock = command, lock
        self._process: subprocess.Popen[bytes] | None = None
        self._pids: dict[str, int | None] = {}
        """Of each cell that was asked for and has not ended; None until it is known."""
        self._rest, self._ready = b"", False

    def __enter__(self) -> CellServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Kill what runs, and wait until it is gone."""
        if self._process is not None:
            assert self._process.stdin is not None
            with suppress(BrokenPipeError, subprocess.TimeoutExpired):
                self._process.stdin.close()
                self._process.wait(_PATIENCE_S)
            self._bury(self._process)

    def start(self, cell: str, arguments: Sequence[str], output: Path, environment: Mapping[str, str]) -> None:
        """Ask for the process of ``cell``; it is on its way until ``events`` tells that it has started."""
        if self._process is None:
            self._launch()
        self._pids[cell] = None
        self._ask(start=cell, arguments=list(arguments), output=str(output), environment=dict(environment))

    def signal(self, cell: str, number: int) -> None:
        """Send a signal to all processes of ``cell``, if it runs."""
        self._ask(signal=number, cell=cell)

    def events(self, timeout_s: float | None) -> list[CellStarted | CellEnded]:
        """What has happened; waits for something to happen, ``timeout_s`` at most.

        Raises:
            ServerError: the program died before it was ready.
        """
        process = self._process
        if process is None:
            return []
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], timeout_s)
        if not ready:
            return []
        chunk = os.read(process.stdout.fileno(), 1 << 16)
        if not chunk:
            return self._died(process)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [event for event in map(self._event, map(json.loads, lines)) if event is not None]

    def _launch(self) -> None:
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._rest, self._ready = b"", False
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            # Lightning sets it as well; without it, asking whether there is a GPU would touch it.
            env={**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            pass_fds=() if self._lock is None else (self._lock,),
            start_new_session=True,  # Ctrl-C in the terminal is for the sweep, which lets its cells end
        )

    def _ask(self, **request: Any) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):  # it died: events will tell
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()

    def _event(self, answer: Mapping[str, Any]) -> CellStarted | CellEnded | None:
        if "started" in answer:
            self._pids[answer["started"]] = answer["pid"]
            return CellStarted(answer["started"])
        if "ended" in answer:
            self._pids.pop(answer["ended"], None)
            return CellEnded(answer["ended"], answer["code"], answer["lost"])
        self._ready = True
        return None

    def _died(self, process: subprocess.Popen[bytes]) -> list[CellStarted | CellEnded]:
        """Its cells die with it; what they started does not."""
        self._process = None
        for pid in self._pids.values():
            if pid is not None:
                _kill_group(pid)
        said = self._bury(process)
        how = f"the process that starts cells died ({_how(process.returncode)})"
        if not self._ready:
            raise ServerError(f"{how}: {said}" if said else how)
        lost = [CellEnded(cell, None, how) for cell in self._pids]
        self._pids.clear()
        return [*lost]

    def _bury(self, process: subprocess.Popen[bytes]) -> str:
        """Close everything of it; returns the last line that it said."""
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        with self._said as said:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


def _kill_group(pid: int, patience_s: float = 1.0) -> None:
    until = time.monotonic() + patience_s
    with suppress(ProcessLookupError):
        while time.monotonic() < until:
            os.killpg(pid, signal.SIGKILL)
            time.sleep(0.01)


def _how(code: int | None) -> str:
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
