"""Calls a function in a child process, a fork or a fresh interpreter, so that this process does not change."""

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

# The wall time that a child may take, as a multiple of its CPU time: cores may be busy, or a disk slow.
PATIENCE = 3.0

_MAX_QUESTION_BYTES = 256 << 20  # most bytes sent to a fresh interpreter
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_PR_SET_CHILD_SUBREAPER = 36
# environment variables with facts about other ranks, or that keep torch from counting devices through CUDA itself
_PARENTS_VARIABLES = (
    "LM_PROFILER",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
)

_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.stdin.buffer.readline())
from lm_profiler.processes.child import main
main()
"""


class NoAnswer(Exception):
    """Raised if the child ended without an answer, took too long, or could not be started; the message says why."""


class Unfit(Exception):
    """Raised in a fork that cannot find the answer, although a fresh interpreter may find it."""


@dataclass(frozen=True)
class NamedCall:
    """A call of a function by its name, so that only the child has to import it."""

    name: str
    arguments: tuple[Any, ...]

    def __call__(self) -> Any:
        function = resolve_name(self.name)
        return function(*self.arguments)


class Child(Generic[Answer]):
    """A child process, started at once, that calls ``find`` and sends the result.

    The child leads a process group, prints nothing and sees no device. It is killed with its group when it has
    answered, or when this process ends. It is a fork of this process, which is fast, or a fresh interpreter, which has
    to import everything that ``find`` needs. A fork does not work if this process has opened a device, or has counted
    its devices through CUDA.

    Args:
        find: the function to call.
        limit_s: the most CPU time; the most wall time is ``PATIENCE`` times that.
        fresh: whether the child must be a fresh interpreter: a fork shares file offsets and shared memory, so it must
            not run user code beside a run of the same code.
        limit_bytes: the most memory; None without a limit.
    """

    def __init__(
        self,
        find: Callable[[], Answer],
        limit_s: float,
        fresh: bool = False,
        limit_bytes: int | None = None,
    ) -> None:
        self._find = find
        self._limit_s = limit_s
        self._limit_bytes = limit_bytes
        self._deadline = time.monotonic() + PATIENCE * limit_s
        # the end of the pipe over which the child answers; None while no child runs
        self._link: Connection | None = None
        self._folder: str | None = None  # for temporary files of the child
        self._start_error: NoAnswer | None = None  # why the child could not be started
        self._begin(fresh or not can_fork())

    def _begin(self, fresh: bool) -> None:
        """Start the child; if that fails, keep the error for ``answer``, which raises it."""
        try:
            # Made here, because the child is killed and cannot remove its files. The path is short, because the path of
            # a socket has at most 107 bytes.
            self._folder = tempfile.mkdtemp(prefix="lmp-")
            limits = (self._limit_s, self._limit_bytes, self._folder)
            question = _pickled_question(self._find, limits) if fresh else b""
            link, childs_end = Pipe(duplex=False)
            with childs_end:
                if fresh:
                    self._process: Any = start_interpreter(question, childs_end)
                else:
                    self._process = _fork(self._find, limits, childs_end)
            self._link = link
        except NoAnswer as error:
            self._start_error = error
            self.end()
        except OSError as error:  # no more processes, or no room for a temporary file
            self._start_error = NoAnswer(f"no process can be started: {error}")
            self.end()

    def answer(self) -> Answer:
        """Wait for the result of ``find``, and end the child; raise NoAnswer if there is none."""
        kind, answer = self._receive()
        # The child was a fork that cannot find the answer: ``find`` raised Unfit, or this process has counted devices.
        if kind == "unfit":
            self._begin(fresh=True)
            kind, answer = self._receive()
        if kind != "answer":
            raise NoAnswer(answer)
        return answer  # type: ignore[no-any-return]

    def _receive(self) -> tuple[str, Any]:
        """Wait for the child's message, end the child, and return the kind of the message and its content."""
        if self._link is None:
            raise self._start_error or NoAnswer("the child process was ended before")
        try:
            seconds_left = max(self._deadline - time.monotonic(), 0.0)
            if not self._link.poll(seconds_left):
                raise NoAnswer(
                    f"the child process took more than {PATIENCE * self._limit_s:g} s"
                )
            message: tuple[str, Any] = self._link.recv()
        except EOFError:
            code = _exit_code(self._process)
            if code == -signal.SIGPROF:  # the timer that `_confine` has set
                raise NoAnswer(
                    f"the child process took more than {self._limit_s:g} s of CPU time"
                ) from None
            raise NoAnswer(f"the child process ended: {end_text(code)}") from None
        finally:
            self.end()
        return message

    def end(self) -> None:
        """Kill the child and all processes that it started, and remove its files."""
        if self._link is not None:
            self._kill()
            self._link.close()
            self._link = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _kill(self) -> None:
        """Kill the child and its descendants, and wait for its end."""
        descendants: list[psutil.Process] = []
        with suppress(psutil.Error):
            # Listed before the child dies. It has adopted processes whose parents have ended; after its death nothing
            # would show that they belong to it.
            descendants = psutil.Process(self._process.pid).children(recursive=True)
        with suppress(ProcessLookupError):  # it may not lead a group yet
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in descendants:  # some may have left the group
            with suppress(psutil.Error):
                process.kill()
        self._process.kill()
        _exit_code(self._process)  # waits for its end, so that the system can forget it


def can_fork() -> bool:
    """Return whether a fork of this process works: on Linux, before a device was opened."""
    if sys.platform != "linux":
        return False
    torch = sys.modules.get("torch")
    return torch is None or not torch.cuda.is_initialized()


def start_interpreter(question: bytes, link: Connection) -> Any:
    """Start a fresh interpreter that reads the ``question`` from stdin and answers over ``link``."""
    with tempfile.TemporaryFile() as file:
        # The file has no name, so that no other process can change what is unpickled.
        file.write(question)
        file.seek(0)
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(link.fileno())],
            stdin=file,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(link.fileno(),),
            env=child_environment(),
            start_new_session=True,
        )


def _fork(find: Callable[[], Any], limits: Limits, link: Connection) -> Any:
    """Start a copy of this process that calls ``find`` within ``limits`` and answers over ``link``."""
    process = get_context("fork").Process(
        target=_answer_in_copy, args=(find, limits, link)
    )
    with warnings.catch_warnings():
        # Since 3.12 Python warns that a fork may wait forever for a lock of another thread. Our time limit ends it.
        warnings.filterwarnings(
            "ignore", ".*multi-threaded, use of fork", DeprecationWarning
        )
        process.start()
    return process


def _exit_code(process: Any) -> int | None:
    """Wait for the end of ``process`` and return its exit code."""
    if isinstance(process, subprocess.Popen):
        return process.wait()
    process.join()
    code: int | None = process.exitcode
    return code


def child_environment() -> dict[str, str]:
    """Return the environment of a child: without devices, torch's compiler and facts about other ranks."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _PARENTS_VARIABLES
    }
    environment.update(
        CUDA_VISIBLE_DEVICES="", TORCHDYNAMO_DISABLE="1", OMP_NUM_THREADS="1"
    )
    return environment


# -- what is sent to a fresh interpreter -------------------------------------------------------------------------------


def _pickled_question(find: Callable[[], Any], limits: Limits) -> bytes:
    """Return what a fresh interpreter reads: ``sys.path`` and the limits as lines of JSON, and the pickled ``find``."""
    pickled = io.BytesIO()
    try:
        _Writer(pickled).dump(find)
    except NoAnswer:
        raise
    except Exception as error:
        raise NoAnswer(
            f"it cannot be sent to another process: {type(error).__name__}: {error}"
        ) from None
    if pickled.tell() > _MAX_QUESTION_BYTES:
        raise NoAnswer(
            f"it cannot be sent to another process: it is larger than {_MAX_QUESTION_BYTES >> 20} MiB"
        )
    path_line = json.dumps(sys.path).encode()
    limits_line = json.dumps([os.getpid(), *limits]).encode()
    return b"\n".join([path_line, limits_line, pickled.getvalue()])


class _Writer(pickle.Pickler):
    """Refuses objects that another process could not unpickle, before that process is started."""

    def reducer_override(self, value: Any) -> Any:
        """Raise NoAnswer for an object whose class is defined in the script; pickle all others as usual."""
        definition: Any = type(value)
        if isinstance(value, (type, types.FunctionType)):
            definition = value
        if definition.__module__ == "__main__":
            name = definition.__qualname__
            raise NoAnswer(
                f"{name} is defined in the script itself: put it into a module that can be imported"
            )
        return NotImplemented


# -- in the child ------------------------------------------------------------------------------------------------------


def main() -> None:
    """Answer the question on stdin, in a fresh interpreter."""
    link = Connection(int(sys.argv[1]))
    os.set_inheritable(link.fileno(), False)
    answer_question(sys.stdin.buffer, link)


def answer_question(
    question: BinaryIO, link: Connection, is_asked_by_parent: bool = True
) -> None:
    """Read limits and function from ``question``, whose first line has been read, and answer over ``link``."""
    parent, *limits = json.loads(question.readline())
    _confine(*limits)
    # The parent may have died before `die_with_parent` took effect.
    parent_has_died = is_asked_by_parent and os.getppid() != parent
    if parent_has_died:
        os._exit(1)
    _answer(lambda: pickle.load(question)(), link)  # unpickles ``find``, and calls it


def _answer_in_copy(find: Callable[[], Any], limits: Limits, link: Connection) -> None:
    """Answer in a fork of the parent; a fork cannot answer if the parent has counted devices through CUDA."""
    _confine(*limits)
    os.dup2(1, 0)  # replaces stdin, whose position a fork shares with its parent
    torch = sys.modules.get("torch")
    if torch is not None:
        if torch.cuda.is_available():
            # This process should see no device, but CUDA had counted them before the fork. Autograd would start a
            # thread for each device, and a fork cannot open them.
            link.send(("unfit", None))
            return
        # a fork has lost the pool of threads, and would wait for it forever
        torch.set_num_threads(1)
    _answer(find, link)


def _confine(cpu_s: float, data_bytes: int | None, folder: str) -> None:
    """Make this process die with its parent, lead a group, print nothing and keep its limits."""
    die_with_parent()
    if sys.platform == "linux":
        # makes it the parent of descendants whose own parents have ended
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    # A fork inherits its parent's handlers, and asyncio's wake-up pipe.
    signal.set_wakeup_fd(-1)
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGCHLD,
        signal.SIGALRM,
        signal.SIGPROF,
    ):
        signal.signal(number, signal.SIG_DFL)
    # ends this process even if its parent no longer waits for it
    signal.alarm(ceil(PATIENCE * cpu_s) + 1)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    if data_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, data_bytes))
    devnull = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(devnull, stream)
    environment = child_environment()
    os.environ.clear()
    os.environ.update(environment)
    os.environ["TMPDIR"] = folder
    tempfile.tempdir = folder


def _answer(find: Callable[[], Any], link: Connection) -> None:
    """Send the result of ``find``, or the reason why there is none, and wait to be killed."""
    try:
        link.send(("answer", find()))
    except Unfit:
        link.send(("unfit", None))
    except Exception as error:
        link.send(("failed", f"{type(error).__name__}: {error}"))
    while True:
        # Not ended here, because the children of this process can only be found while it exists.
        signal.pause()


# -- any child ---------------------------------------------------------------------------------------------------------


def die_with_parent() -> None:
    """Make Linux kill this process when its parent ends for whatever reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_text(code: int | None) -> str:
    """Return how a process with this exit ``code`` ended, such as ``exit code 3``, ``SIGKILL`` or ``signal 35``."""
    if code is None or code >= 0:
        return f"exit code {code}"
    number = -code
    has_name = number in list(signal.Signals)
    return signal.Signals(number).name if has_name else f"signal {number}"
