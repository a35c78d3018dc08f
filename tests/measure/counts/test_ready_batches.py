"""Batches that workers have made ahead, against workers that stop where they are told."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lm_profiler.measure.counts.step_reader import ready_batches

MAY_GO_ON = 3


class Gated(Dataset[torch.Tensor]):
    """Items from ``MAY_GO_ON`` on wait until they are let go."""

    def __init__(self, gate: Any) -> None:
        self.gate = gate

    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> torch.Tensor:
        if at >= MAY_GO_ON:
            self.gate.wait(30)
        return torch.tensor(at)


def _settled(iterator: Any, count: int) -> int | None:
    until = time.monotonic() + 20
    while ready_batches(iterator, 1) != count and time.monotonic() < until:
        time.sleep(0.005)
    return ready_batches(iterator, 1)


def test_what_is_made_and_not_taken_is_counted() -> None:
    context = multiprocessing.get_context("fork")
    gate = context.Event()
    loader = DataLoader(Gated(gate), 1, num_workers=1, prefetch_factor=5, multiprocessing_context=context)
    iterator = iter(loader)
    assert _settled(iterator, MAY_GO_ON) == 3
    next(iterator)
    assert ready_batches(iterator, 1) == 2
    gate.set()
    assert _settled(iterator, 5) == 5


@pytest.mark.parametrize("iterator,ready", [(iter(DataLoader([1, 2])), 0), (iter([1]), None)])
def test_without_workers_none_are_ready_and_of_a_stranger_nothing_is_known(iterator: Any, ready: int | None) -> None:
    assert ready_batches(iterator, 0) == ready
