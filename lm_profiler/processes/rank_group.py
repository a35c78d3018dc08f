"""Starts the ranks of a measurement as fresh processes on this machine, and reports which rank failed or died."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from lm_profiler.processes.child import die_with_parent, end_text

# seconds to wait for the death of the rank that caused a failure, because its peers often report the failure first
_GRACE_S = 2.0


class RankFailed(Exception):
    """Raised if a rank raised or died; the message has its number and the reason. If a rank hangs, its peers raise."""


# what a rank runs: takes its number, and a function that sends a message to the process that started the ranks
Work = Callable[[int, Callable[[object], None]], object]


def rank_messages(work: Work, ranks: int) -> Iterator[Any]:
    """Call ``work`` in ``ranks`` fresh processes, and yield the messages that they send; then end all processes.

    Raises:
        RankFailed: a rank raised or died.
    """
    # not forked, because a fork of a process that has opened a device cannot use it
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
            rank_end.close()  # so that the pipe ends when the rank ends
        while ranks_by_link:
            for ready_link in wait(list(ranks_by_link)):
                kind, message = _receive(ready_link)
                if kind == "message":
                    yield message
                    continue
                rank = ranks_by_link.pop(ready_link)
                if kind != "done":
                    raise RankFailed(_failure_text(rank, message, processes))
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


def _failure_text(rank: int, message: str | None, processes: Sequence[Any]) -> str:
    """Return how ``rank`` failed, or which rank died and so made ``rank`` fail."""
    sentinels = [process.sentinel for process in processes]
    # A rank that fails or finishes sends a message and waits to be killed. So a process that has ended was a rank that
    # died without a message.
    sentinels_of_dead = wait(sentinels, _GRACE_S)
    for dead_rank, process in enumerate(processes):
        if process.sentinel in sentinels_of_dead:
            process.join()  # its pipes close a moment before its exit code is known
            how_it_ended = end_text(process.exitcode)
            return f"rank {dead_rank} died: {how_it_ended}"
    return f"rank {rank} failed: {message}"


def _run_rank(work: Work, rank: int, link: Connection) -> None:
    """Do the ``work`` of a rank in its own process, send how it ended over ``link``, and wait to be killed."""
    die_with_parent()
    # Ctrl-C is handled by the process that started the ranks, which then ends them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # gloo prints to stdout
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)

    def send_message(message: object) -> None:
        link.send(("message", message))

    try:
        work(rank, send_message)
        link.send(("done", None))
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        link.send(("failed", f"{type(error).__name__}: {text}"))
    while True:
        # Not ended here, because destroying a process group may hang.
        signal.pause()
