"""How many prefetched batches a loader holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from lm_profiler.torch_names import READY_PINNED, READY_RESULTS, READY_TASKS


def ready_batches(iterator: Iterator[Any], workers: int | None) -> int | None:
    """Return how many prefetched batches a DataLoader's ``iterator`` holds; 0 without workers.

    None for an iterator that is not torch's own, or where its queues do not know their length (macOS). Takes
    microseconds and never blocks. Batches lie in the workers' queue, and with pinned memory in a second one; those that
    arrived out of order are kept apart.

    Raises:
        NameMissing: This torch keeps them elsewhere.
    """
    if type(iterator).__module__ != DataLoader.__module__:
        return None
    if workers == 0:
        return 0
    # Without pinned memory both names are the same queue.
    queues = {id(queue): queue for queue in (READY_RESULTS.of(iterator), READY_PINNED.of(iterator))}
    try:
        waiting = sum(queue.qsize() for queue in queues.values())
    except NotImplementedError:
        return None
    # A task of one element is still with its worker; the second is the batch, which came out of order.
    return int(waiting) + sum(len(task) == 2 for task in READY_TASKS.of(iterator).values())
