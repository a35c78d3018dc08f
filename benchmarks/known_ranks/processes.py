"""A function on several ranks, each a process that has imported everything already."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.free_port import free_port

Result = TypeVar("Result")


def on_ranks(
    world: int, work: Callable[[int], Result], limit_s: float = 600.0
) -> list[Result]:
    """What ``work`` returns on each of ``world`` ranks, whose environment is that of processes started by others.

    They are forked, so that imports are paid once, and may make any number of Trainers: the first sets up the process
    group, and the others find it.

    Raises:
        RuntimeError: a rank failed, or ``limit_s`` went by. No process is left.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "NODE_RANK": "0",
        }
        forked = multiprocessing.get_context("fork")
        ranks = [
            forked.Process(target=_rank, args=(n, work, Path(folder), environment))
            for n in range(world)
        ]
        for each in ranks:
            each.start()
        try:
            _await(ranks, Path(folder), limit_s)
        finally:
            for each in ranks:
                each.kill()
                each.join()
        said = [
            pickle.loads(path.read_bytes())
            for path in sorted(Path(folder).glob("?????"))
        ]
    failed = [text for known, text in said if not known]
    if failed or len(said) < world:
        raise RuntimeError("\n".join(["a rank failed", *failed]))
    return [value for _, value in said]


def _await(ranks: list[Any], folder: Path, limit_s: float) -> None:
    """Until all have ended, one has without an answer, or ``limit_s`` went by."""
    until, running = time.monotonic() + limit_s, {each.sentinel: each for each in ranks}
    while running and time.monotonic() < until:
        for ended in wait(list(running), timeout=1.0):
            running.pop(ended)  # type: ignore[call-overload]  # sentinels went in
        answers = [pickle.loads(path.read_bytes()) for path in folder.glob("?????")]
        if len(answers) < len(ranks) - len(running) or not all(
            known for known, _ in answers
        ):
            return


def _rank(
    number: int,
    work: Callable[[int], Result],
    folder: Path,
    environment: dict[str, str],
) -> None:
    os.environ |= {**environment, "LOCAL_RANK": str(number)}
    torch.set_num_threads(1)
    try:
        answer: tuple[bool, object] = (True, work(number))
    except BaseException:
        answer = (False, f"rank {number}: {traceback.format_exc()}")
    (folder / f"new{number}").write_bytes(pickle.dumps(answer))
    (folder / f"new{number}").rename(folder / f"{number:05}")
    # without taking groups of Gloo's apart, whose threads abort a process once in a while
    os._exit(0)
