"""Delays that are said while a loader's workers run, and what the workers say of them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lm_profiler.measure.delays.workers import DelayedCollate, WorkerDelays


def collate(samples: list[tuple[Tensor]]) -> Tensor:
    return torch.stack([sample for (sample,) in samples])


def delayed(workers: int, **options: object) -> tuple[WorkerDelays, Iterator[Tensor]]:
    delays = WorkerDelays(workers)
    data = TensorDataset(torch.arange(100.0))
    loader = DataLoader(
        data,
        1,
        num_workers=workers,
        collate_fn=DelayedCollate(collate, delays),
        **options,  # type: ignore[arg-type]
    )
    return delays, iter(loader)


@pytest.mark.parametrize("workers, context", [(1, "fork"), (2, "fork"), (2, "spawn")])
def test_what_is_said_reaches_workers_that_run_already(workers: int, context: str) -> None:
    delays, batches = delayed(workers, multiprocessing_context=context)
    queued = 2 * workers
    assert [next(batches).item() for _ in range(3)] == [0.0, 1.0, 2.0]
    assert delays.taken() == (0.0, 0)
    delays.say(0.02)
    rest = [next(batches).item() for _ in range(queued + 10)]
    assert rest == [float(n) for n in range(3, 13 + queued)]
    seconds, count = delays.taken()
    assert count >= 10
    assert seconds >= 0.02 * count  # a sleep is never shorter
    delays.say(0.0)
    list(batches)
    assert delays.taken()[1] <= count + 2 * queued


def test_workers_hold_until_what_they_made_was_taken() -> None:
    delays, batches = delayed(2)
    next(batches)
    time.sleep(0.2)  # the queue of four is full, or a busy machine has not got there: then it holds all the earlier
    began = time.monotonic()
    delays.say(0.0, hold_s=0.5)
    for _ in range(5):
        next(batches)
    assert time.monotonic() - began >= 0.5
    assert delays.taken() == (0.0, 0)


def test_in_the_training_process_nothing_is_delayed() -> None:
    delays = WorkerDelays(1)
    delays.say(60.0, hold_s=60.0)
    assert DelayedCollate(collate, delays)([(torch.tensor(1.0),)]).item() == 1.0


class Fails(WorkerDelays):
    def take(self, worker: int) -> None:
        raise OSError("no memory to share")


def test_what_fails_in_a_delay_ends_no_training() -> None:
    collates = DelayedCollate(collate, Fails(2))
    batches = DataLoader(TensorDataset(torch.arange(20.0)), 1, num_workers=2, collate_fn=collates)
    assert [batch.item() for batch in batches] == [float(n) for n in range(20)]
    assert collates.delays.taken() == (0.0, 0)
