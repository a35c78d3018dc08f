"""Calls a function in a child process, a fork or a fresh interpreter, so that this process stays unchanged."""

from __future__ import annotations

import ctypes
import io
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe
from pkgutil import resolve_name
from typing import Any, BinaryIO, Generic, TypeVar

import psutil

Answer = TypeVar("Answer")
# the limits of a child: CPU time in seconds, memory in bytes, and its folder for temporary files
Limits = tuple[float, int | None, str]

PATIENCE = 3.0  # wall time that a child may take, in multiples of its CPU time: cores may be busy, or a disk slow

_MOST_SENT = 256 << 20  # most bytes sent to a fresh interpreter
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
# variables that tell a process about other ranks, or keep torch from asking CUDA itself for the number of devices
_NOT_HANDED_ON = ("LM_PROFILER", "RANK", "LOCAL_RANK", "WORLD_SIZE", "PYTORCH_NVML_BASED_CUDA_CHECK")

_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.stdin.buffer.readline())
from lm_profiler.processes.child import main
main()
"""


class NoAnswer(Exception):
    """The child ended without an answer, took too long, or could not be started; the message says which."""


class Unfit(Exception):
    """Raised in a fork that cannot find the answer; a fresh interpreter may."""


@dataclass(frozen=True)
class Named:
    """A call of a function by its name, so that only the child has to import it."""

    name: str
    given: tuple[Any, ...]

    def __call__(self) -> Any:
        return resolve_name(self.name)(*self.given)


class Child(Generic[Answer]):
    """A child process, started at once, that calls ``find`` and sends back the result.

    The child leads a process group, is silent, sees no device, and is killed with its group once it has answered, or
    when this process ends. It is a fork of this process, or a fresh interpreter, which has to import all that ``find``
    needs: if this process has opened a device or counted its devices through CUDA, a fork cannot work; and if
    ``find`` runs user code beside a run of the same code, the child must be ``fresh``, since a fork shares file
    offsets and shared memory. The child may take ``limit_s`` of CPU time, ``PATIENCE`` times that of wall time, and
    ``limit_bytes`` of memory.
    """

    def __init__(
        self, find: Callable[[], Answer], limit_s: float, fresh: bool = False, limit_bytes: int | None = None
    ) -> None:
        self._find, self._limit_s, self._until = find, limit_s, time.monotonic() + PATIENCE * limit_s
        self._limit_bytes = limit_bytes
        self._link: Connection | None = None
        self._folder: str | None = None
        self._refused: NoAnswer | None = None
        self._begin(fresh or not can_fork())

    def _begin(self, fresh: bool) -> None:
        try:
            # The child is killed, so it cannot remove its files. Its path is short: a socket's has at most 107 bytes.
            self._folder = tempfile.mkdtemp(prefix="lmp-")
            limits = (self._limit_s, self._limit_bytes, self._folder)
            told = _told(self._find, limits) if fresh else b""
            link, theirs = Pipe(duplex=False)
            with theirs:
                self._process: Any = interpreter(told, theirs) if fresh else _fork(self._find, limits, theirs)
            self._link = link
        except NoAnswer as refused:
            self._refused = refused
            self.end()
        except OSError as error:  # no more processes, or no room for a temporary file
            self._refused = NoAnswer(f"no process can be started: {error}")
            self.end()

    def answer(self) -> Answer:
        """Wait for the result of ``find``, and end the child; raises NoAnswer where there is none."""
        kind, answer = self._heard()
        if kind == "unfit":
            self._begin(fresh=True)
            kind, answer = self._heard()
        if kind != "answer":
            raise NoAnswer(answer)
        return answer  # type: ignore[no-any-return]

    def _heard(self) -> tuple[str, Any]:
        if self._link is None:
            raise self._refused or NoAnswer("the child was ended before")
        try:
            if not self._link.poll(max(self._until - time.monotonic(), 0.0)):
                raise NoAnswer(f"it took more than {PATIENCE * self._limit_s:g} s")
            heard: tuple[str, Any] = self._link.recv()
        except EOFError:
            code = _exit_code(self._process)
            if code == -signal.SIGPROF:  # the timer that `_confine` has set
                raise NoAnswer(f"it took more than {self._limit_s:g} s of CPU time") from None
            raise NoAnswer(f"the child process ended: {how_ended(code)}") from None
        finally:
            self.end()
        return heard

    def end(self) -> None:
        if self._link is not None:
            started = list[psutil.Process]()
            with suppress(psutil.Error):
                # Listed before the child dies: it adopts processes whose parents have ended, and later nobody knows
                # where they came from.
                started = psutil.Process(self._process.pid).children(recursive=True)
            with suppress(ProcessLookupError):  # it may not lead a group yet
                os.killpg(self._process.pid, signal.SIGKILL)
            for each in started:  # processes that have left the group
                with suppress(psutil.Error):
                    each.kill()
            self._process.kill()
            _exit_code(self._process)
            self._link.close()
            self._link = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def can_fork() -> bool:
    """Return whether a fork of this process works: on Linux, before a device was opened."""
    torch = sys.modules.get("torch")
    return sys.platform == "linux" and (torch is None or not torch.cuda.is_initialized())


def interpreter(told: bytes, link: Connection) -> Any:
    """Start a fresh interpreter that reads ``told`` from stdin and answers over ``link``."""
    with tempfile.TemporaryFile() as file:  # without a name: no other process can write to what is unpickled
        file.write(told)
        file.seek(0)
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(link.fileno())],
            stdin=file,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(link.fileno(),),
            env=surroundings(),
            start_new_session=True,
        )


def _fork(find: Callable[[], Any], limits: Limits, link: Connection) -> Any:
    process = get_context("fork").Process(target=_answer_in_copy, args=(find, limits, link))
    with warnings.catch_warnings():
        # Since 3.12 Python warns that a fork may wait forever for a lock of another thread; our limit ends that.
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
        process.start()
    return process


def _exit_code(process: Any) -> int | None:
    if isinstance(process, subprocess.Popen):
        return process.wait()
    process.join()
    code: int | None = process.exitcode
    return code


def surroundings() -> dict[str, str]:
    """Return the environment of a child: without devices, compiler and other ranks."""
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_HANDED_ON}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}


# -- what is sent to a fresh interpreter -------------------------------------------------------------------------------


def _told(find: Callable[[], Any], limits: Limits) -> bytes:
    """Return what a fresh interpreter reads: ``sys.path`` and the limits, lines of JSON, and ``find``, pickled."""
    pickled = io.BytesIO()
    try:
        _Writer(pickled).dump(find)
    except NoAnswer:
        raise
    except Exception as error:
        raise NoAnswer(f"it cannot be sent to another process: {type(error).__name__}: {error}") from None
    if pickled.tell() > _MOST_SENT:
        raise NoAnswer(f"it cannot be sent to another process: it is larger than {_MOST_SENT >> 20} MiB")
    return b"\n".join([*(json.dumps(line).encode() for line in (sys.path, [os.getpid(), *limits])), pickled.getvalue()])


class _Writer(pickle.Pickler):
    """Refuses what no other process could unpickle, before one is started."""

    def reducer_override(self, value: Any) -> Any:
        named = value if isinstance(value, (type, types.FunctionType)) else type(value)
        if named.__module__ == "__main__":
            name = named.__qualname__
            raise NoAnswer(f"{name} is defined in the script itself: put it into a module that can be imported")
        return NotImplemented


# -- in the child ------------------------------------------------------------------------------------------------------


def main() -> None:
    link = Connection(int(sys.argv[1]))
    os.set_inheritable(link.fileno(), False)
    answer_told(sys.stdin.buffer, link)


def answer_told(told: BinaryIO, link: Connection, is_ours: bool = True) -> None:
    """Read limits and function from ``told``, whose first line has been read, and answer over ``link``.

    ``is_ours``: whether the process that asks is the parent of this one.
    """
    parent, *limits = json.loads(told.readline())
    _confine(*limits)
    if is_ours and os.getppid() != parent:  # the parent died before `die_with_parent` took effect
        os._exit(1)
    _answer(lambda: pickle.load(told)(), link)


def _answer_in_copy(find: Callable[[], Any], limits: Limits, link: Connection) -> None:
    _confine(*limits)
    os.dup2(1, 0)  # a fork shares the position in stdin with its parent
    torch = sys.modules.get("torch")
    if torch is not None:
        if torch.cuda.is_available():
            # This process sees no device. CUDA itself has counted them before the fork: autograd would start a thread
            # for each, and a fork cannot open them.
            link.send(("unfit", None))
            return
        torch.set_num_threads(1)  # a fork has no pool of threads, and would wait for it
    _answer(find, link)


def _confine(cpu_s: float, data_bytes: int | None, folder: str) -> None:
    """Make this process die with its parent, lead a group, be silent and keep its limits."""
    die_with_parent()
    if sys.platform == "linux":  # become the parent of descendants whose own parents have ended
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    # A fork inherits its parent's handlers, and asyncio's wake-up pipe.
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
    signal.alarm(ceil(PATIENCE * cpu_s) + 1)  # ends this process even if nobody waits for it any more
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    if data_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, data_bytes))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    kept = surroundings()
    os.environ.clear()
    os.environ.update(kept)
    os.environ["TMPDIR"] = tempfile.tempdir = folder


def _answer(find: Callable[[], Any], link: Connection) -> None:
    try:
        link.send(("answer", find()))
    except Unfit:
        link.send(("unfit", None))
    except Exception as error:
        link.send(("failed", f"{type(error).__name__}: {error}"))
    while True:  # wait to be killed: this process's children can be found as long as it lives
        signal.pause()


# -- any child ---------------------------------------------------------------------------------------------------------


def die_with_parent(begin: bool = True) -> None:
    """Have Linux kill this process when its parent ends for whatever reason; ``begin=False`` undoes that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if begin else 0)


def how_ended(code: int | None) -> str:
    """Return ``exit code 3``, ``SIGKILL``, or ``signal 35`` where the signal has no name."""
    if code is None or code >= 0:
        return f"exit code {code}"
    return signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
