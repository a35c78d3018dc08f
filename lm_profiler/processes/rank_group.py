"""Starts the ranks of a measurement as fresh processes of this machine, and reports which of them failed or died."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from lm_profiler.processes.child import die_with_parent, end_text

# seconds to wait for the death of the rank that caused a failure: its peers often report first
_GRACE_S = 2.0


class RankFailed(Exception):
    """A rank raised or died; the message has its number and the reason. If a rank hangs, its peers raise."""


# what a rank does, given its number and a function that sends a message to the process that started it
Work = Callable[[int, Callable[[object], None]], object]


def rank_messages(work: Work, ranks: int) -> Iterator[Any]:
    """Call ``work`` in ``ranks`` fresh processes, and yield what they send; no process is left at the end.

    Raises:
        RankFailed: a rank raised or died.
    """
    # a fork of a process that has opened a device cannot use it
    context = get_context("spawn")
    processes: list[Any] = []
    ranks_by_link: dict[Any, int] = {}
    try:
        for rank in range(ranks):
            link, rank_end = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_rank, args=(work, rank, rank_end), daemon=True
            )
            process.start()
            processes.append(process)
            ranks_by_link[link] = rank
            rank_end.close()  # so that the end of the rank is the end of the pipe
        while ranks_by_link:
            for ready_link in wait(list(ranks_by_link)):
                kind, message = _receive(ready_link)
                if kind == "message":
                    yield message
                    continue
                rank = ranks_by_link.pop(ready_link)
                if kind != "done":
                    raise RankFailed(_cause(rank, message, processes))
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _receive(link: Any) -> tuple[str, Any]:
    """Return the kind of the next message of a rank, and the message; the kind is ``ended`` if the rank died."""
    try:
        kind, message = link.recv()
    except (EOFError, OSError):
        return "ended", None
    return kind, message


def _cause(rank: int, message: str | None, processes: Sequence[Any]) -> str:
    """Return how ``rank`` failed, or which rank died silently and so made ``rank`` fail."""
    sentinels = [process.sentinel for process in processes]
    # A rank that failed or finished sends a message and waits to be killed: one that is dead died without a message.
    sentinels_of_dead = wait(sentinels, _GRACE_S)
    for number, process in enumerate(processes):
        if process.sentinel in sentinels_of_dead:
            process.join()  # its pipes close a moment before its exit code is known
            return f"rank {number} died: {end_text(process.exitcode)}"
    return f"rank {rank} failed: {message}"


def _run_rank(work: Work, rank: int, link: Connection) -> None:
    """Do the ``work`` of a rank in its own process, send the end of it over ``link``, and wait to be killed."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started it ends it
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # gloo prints there
    try:
        work(rank, lambda message: link.send(("message", message)))
        link.send(("done", None))
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        link.send(("failed", f"{type(error).__name__}: {text}"))
    while True:  # wait to be killed: destroying a process group may hang
        signal.pause()
