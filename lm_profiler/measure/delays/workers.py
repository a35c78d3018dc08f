"""Delays batches in the worker processes of a ``DataLoader``; the training process sets the delay while they run.

Both share one block of memory, which a worker reads once a batch. A delay is a sleep, which keeps no core busy. Workers
report how long it really was.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import get_worker_info

# indices of the shared memory: the delay of a batch in seconds; an instant of ``time.monotonic``, the same clock in all
# processes; then for each worker its seconds of delay and its delayed batches
_DELAY, _HOLD_UNTIL, _TAKEN = 0, 1, 2


class WorkerDelays:
    """The delays of one loader's ``workers``, zero until ``say`` is called."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._shared = torch.zeros(_TAKEN + 2 * workers, dtype=torch.float64).share_memory_()

    def say(self, delay_s: float, hold_s: float = 0.0) -> None:
        """Delay each batch from now on; before that, every worker pauses until ``hold_s`` from now."""
        self._shared[_HOLD_UNTIL] = time.monotonic() + hold_s if hold_s else 0.0
        self._shared[_DELAY] = delay_s

    def taken(self) -> tuple[float, int]:
        """Return the seconds of all delays so far, without pauses, and the number of delayed batches."""
        each = self._shared[_TAKEN:].view(-1, 2).sum(0).tolist()
        return each[0], int(each[1])

    def take(self, worker: int) -> None:
        """Pause and delay as was said; called in the process of ``worker``."""
        delay_s, until = self._shared[_DELAY].item(), self._shared[_HOLD_UNTIL].item()
        if until and (left_s := until - time.monotonic()) > 0:
            time.sleep(left_s)
            delay_s = self._shared[_DELAY].item()  # it may have been set anew meanwhile
        if delay_s:
            began = time.perf_counter()
            time.sleep(delay_s)
            mine = self._shared[_TAKEN + 2 * worker : _TAKEN + 2 * worker + 2]
            mine[0] += time.perf_counter() - began
            mine[1] += 1


class DelayedCollate:
    """A loader's own ``collate``, which a worker calls after its delay.

    An error in a delay does not end training: from then on that worker has no delays, which shows in ``taken``.
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
