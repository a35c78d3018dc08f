"""A question that a copy of this process answers: what was imported is there at once, and nothing here is changed."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from math import ceil
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import psutil
import torch

from lm_profiler.callbacks.outcome.rank_status import how_it_ended
from lm_profiler.cli.endings import adopt, die_with_parent
from lm_profiler.measure.elsewhere import surroundings
from lm_profiler.torch_names import BAD_FORK

Answer = TypeVar("Answer")

PATIENCE = 3.0
"""By the clock it may take so many times the CPU time that it may have: others use the cores, or a disk is slow."""


class NoAnswer(Exception):
    """The other process has ended without one, or took too long; the message says which."""


class Unfit(Exception):
    """A copy of this process cannot find it; a fresh one may."""


class Asked(Generic[Answer]):
    """What ``find`` returns in a process of its own, which begins at once.

    It is a copy of this one (a fork), leads a group of its own, is silent, and is killed with its group once it has
    answered. A copy of a process that has opened a device, or counted its devices by CUDA, is of no use: there, and
    where forks are not safe at all, it is a fresh one, which has to import all that ``find`` needs.

    Args:
        find: can be pickled, as can what it returns. Its exceptions are lost, but for ``Unfit``.
        limit_s: so much CPU time it may take, which busy cores do not change, and ``PATIENCE`` times that by the clock.
        fresh: for what runs code that is not ours beside a run of it: a copy shares open files, whose position it
            moves, and memory that processes share.
    """

    def __init__(self, find: Callable[[], Answer], limit_s: float, fresh: bool = False) -> None:
        self._find, self._limit_s, self._until = find, limit_s, time.monotonic() + PATIENCE * limit_s
        forks = not fresh and sys.platform == "linux" and not torch.cuda.is_initialized()
        self._begin("fork" if forks else "spawn")

    def _begin(self, kind: str) -> None:
        context: Any = get_context(kind)
        self._link, theirs = context.Pipe(duplex=False)
        self._folder = _own_folder()
        self._process = context.Process(target=_find, args=(self._find, self._limit_s, theirs, self._folder))
        with theirs, warnings.catch_warnings():
            # Python 3.12 on warns of threads that hold a lock, for ever in the copy: that the limit ends.
            warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
            self._process.start()

    def answer(self) -> Answer:
        """Wait for it.

        Raises:
            NoAnswer: there is none.
        """
        told = self._told()
        if told is None:
            self._begin("spawn")
            told = self._told()
        assert told is not None  # of a fresh process
        return told[0]

    def _told(self) -> tuple[Answer] | None:
        """The answer; None of a copy that is unfit."""
        try:
            if not self._link.poll(max(self._until - time.monotonic(), 0.0)):
                raise NoAnswer(f"it took more than {PATIENCE * self._limit_s:g} s")
            told: tuple[Answer] | None = self._link.recv()
        except EOFError:
            self._process.join()
            if self._process.exitcode == -signal.SIGPROF:
                raise NoAnswer(f"it took more than {self._limit_s:g} s of CPU time") from None
            raise NoAnswer(f"the process that was asked ended: {how_it_ended(self._process.exitcode)}") from None
        finally:
            self.end()
        return told

    def end(self) -> None:
        """Whether or not it has answered."""
        if self._link.closed:
            return
        started = _started_by(self._process.pid)
        with suppress(ProcessLookupError):  # it may not lead a group yet
            os.killpg(self._process.pid, signal.SIGKILL)
        for each in started:  # what has left the group
            with suppress(psutil.Error):
                each.kill()
        self._process.kill()
        self._process.join()
        self._link.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _own_folder() -> str | None:
    """For temporary files of a process that will be killed, and could not remove them."""
    with suppress(OSError):
        return tempfile.mkdtemp(prefix="lmp-")  # short: names of sockets in it have 107 bytes at most
    return None


def _started_by(pid: int) -> list[psutil.Process]:
    """All processes below that one: it adopts those whose parents have ended."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _find(find: Callable[[], Any], limit_s: float, link: Connection, folder: str | None) -> None:
    die_with_parent()
    adopt()
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.alarm(ceil(PATIENCE * limit_s) + 1)  # also where nobody waits any more
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    # Counted by CUDA itself, and not by NVML: autograd starts a thread for each device, which a copy cannot open.
    if BAD_FORK.find_or(lambda: True)() and torch.cuda.device_count() > 0:
        link.send(None)
        return
    kept = surroundings()
    os.environ.clear()
    os.environ.update(kept)
    if folder is not None:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
    torch.set_num_threads(1)  # a pool of threads is not copied, and would be waited for
    try:
        link.send((find(),))
    except Unfit:
        link.send(None)
    while True:  # what it has started is found as long as it is there
        signal.pause()
