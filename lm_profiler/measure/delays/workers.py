"""Delays in the worker processes of a ``DataLoader``, said by the training process while they run.

What both share is one block of memory, which a worker reads once a batch. A delay is a sleep: it takes no core from
whoever else needs it. Workers say how long it really was.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import get_worker_info

_DELAY, _HOLD_UNTIL, _TAKEN = 0, 1, 2
"""Places in the shared memory: seconds of each batch; an instant of ``time.monotonic``, which is one clock for all
processes; then of each worker the seconds and the batches."""


class WorkerDelays:
    """Of one loader's ``workers``; none until they are said."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._shared = torch.zeros(_TAKEN + 2 * workers, dtype=torch.float64).share_memory_()

    def say(self, delay_s: float, hold_s: float = 0.0) -> None:
        """Delay each batch that is begun from now on, after every worker has held for ``hold_s`` from now."""
        self._shared[_HOLD_UNTIL] = time.monotonic() + hold_s if hold_s else 0.0
        self._shared[_DELAY] = delay_s

    def taken(self) -> tuple[float, int]:
        """Seconds of all delays so far, holding not counted, and over how many batches."""
        each = self._shared[_TAKEN:].view(-1, 2).sum(0).tolist()
        return each[0], int(each[1])

    def take(self, worker: int) -> None:
        """In ``worker``: wait as long as was said."""
        delay_s, until = self._shared[_DELAY].item(), self._shared[_HOLD_UNTIL].item()
        if until and (left_s := until - time.monotonic()) > 0:
            time.sleep(left_s)
            delay_s = self._shared[_DELAY].item()
        if delay_s:
            began = time.perf_counter()
            time.sleep(delay_s)
            mine = self._shared[_TAKEN + 2 * worker : _TAKEN + 2 * worker + 2]
            mine[0] += time.perf_counter() - began
            mine[1] += 1


class DelayedCollate:
    """A loader's own ``collate``, called in a worker after its delay, elsewhere as ever.

    What fails in a delay ends no training: from then on that worker has none, which the seconds that it took tell.
    """

    def __init__(self, collate: Callable[[Any], Any], delays: WorkerDelays) -> None:
        self.collate = collate
        self.delays = delays
        self._fails = False

    def __call__(self, samples: Any) -> Any:
        try:
            worker = get_worker_info()
            if worker is not None and not self._fails:
                self.delays.take(worker.id)
        except Exception:
            self._fails = True
        return self.collate(samples)
