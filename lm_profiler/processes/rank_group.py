"""Starts the ranks of a measurement as fresh processes of this machine, and says which of them died or hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil

from lm_profiler.processes.child import die_with_parent, how_ended
from lm_profiler.record.text import ranks_text

# seconds in which at least one rank has to go on; torch takes some ten to be imported on a busy machine
PATIENCE_S = 60.0
# seconds in which the rank that caused a failure may still be seen to have died: its peers often tell first
_GRACE_S = 2.0


class RankFailed(Exception):
    """A rank raised, died or hangs; the message says which and how."""


@dataclass(frozen=True)
class RankLink:
    """What a rank has of the process that started it."""

    rank: int  # the number of this process
    connection: Connection  # takes what the rank sends
    counts: Any  # int64[ranks], shared: how often each rank has called ``goes_on``

    def send(self, message: object) -> None:
        self.connection.send(("message", message))

    def goes_on(self) -> None:
        """Say that this rank does not hang; called before and after whatever may."""
        self.counts[self.rank] += 1


Work = Callable[[RankLink], object]


def rank_messages(work: Work, ranks: int) -> Iterator[Any]:
    """Call ``work`` in ``ranks`` fresh processes, and yield what they send; no process is left at the end.

    Raises:
        RankFailed: a rank raised, died, or did not go on for ``PATIENCE_S``.
    """
    context = get_context("spawn")  # a fork of a process that has opened a device is of no use
    counts = context.RawArray("q", ranks)
    processes, links = [], dict[Any, int]()  # by the end of each rank's pipe
    try:
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_be_rank, args=(work, RankLink(rank, theirs, counts)), daemon=True)
            process.start()
            processes.append(process)
            links[ours] = rank
            theirs.close()  # so that the end of the rank is the end of the pipe
        yield from _heard(links, processes, counts)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _heard(links: dict[Any, int], processes: Sequence[Any], counts: Any) -> Iterator[Any]:
    seen, since = list(counts), time.monotonic()
    while links:
        for link in wait(list(links), timeout=0.5):
            kind, message = _received(link)
            since = time.monotonic()
            if kind == "message":
                yield message
                continue
            rank = links.pop(link)
            if kind != "done":
                raise RankFailed(_cause(rank, message, links, processes))
        if list(counts) != seen:
            seen, since = list(counts), time.monotonic()
        elif time.monotonic() - since > PATIENCE_S:
            raise RankFailed(f"{ranks_text(_hanging(processes, seen))} did not answer for {PATIENCE_S:g} s")


def _received(link: Any) -> tuple[str, Any]:
    try:
        kind, message = link.recv()
    except (EOFError, OSError):
        return "ended", None
    return kind, message


def _cause(rank: int, message: str | None, links: dict[Any, int], processes: Sequence[Any]) -> str:
    """Return what became of ``rank``, or of one that died without a word and is why ``rank`` failed."""
    until = time.monotonic() + _GRACE_S
    while message is not None and links and (left_s := until - time.monotonic()) > 0:
        for link in wait(list(links), timeout=left_s):
            other = links.pop(link)
            if _received(link)[0] == "ended":
                rank, message = other, None
    if message is not None:
        return f"rank {rank} failed: {message}"
    processes[rank].join(_GRACE_S)
    return f"rank {rank} died: {how_ended(processes[rank].exitcode)}"


def _hanging(processes: Sequence[Any], counts: Sequence[int]) -> list[int]:
    """Return the ranks that are stopped; without any, those that are behind the others, or all."""
    stopped = [rank for rank, of in enumerate(processes) if psutil.Process(of.pid).status() == psutil.STATUS_STOPPED]
    return stopped or [rank for rank, count in enumerate(counts) if count == min(counts)]


def _be_rank(work: Work, link: RankLink) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started it ends it
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # gloo prints there
    try:
        work(link)
        link.connection.send(("done", None))
    except Exception as error:
        link.connection.send(("failed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"))
    while True:  # wait to be killed: to take a group down may hang
        signal.pause()
