"""How many batches a loader's workers have made ahead of the loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from lm_profiler.torch_names import READY_PINNED, READY_RESULTS, READY_TASKS


def ready_batches(iterator: Iterator[Any], workers: int | None) -> int | None:
    """Batches of a DataLoader's ``iterator`` that are made and not taken; 0 without workers.

    None of an iterator that is not torch's own, or where its queues do not tell (macOS). Takes microseconds, and waits
    for nobody. Batches are in the workers' queue, with pinned memory in a second one; those that came before their turn
    are apart.

    Raises:
        NameMissing: this torch keeps them elsewhere.
    """
    if type(iterator).__module__ != DataLoader.__module__:
        return None
    if workers == 0:
        return 0
    queues = {id(queue): queue for queue in (READY_RESULTS.of(iterator), READY_PINNED.of(iterator))}
    try:
        waiting = sum(queue.qsize() for queue in queues.values())
    except NotImplementedError:
        return None
    return int(waiting) + sum(len(task) == 2 for task in READY_TASKS.of(iterator).values())
