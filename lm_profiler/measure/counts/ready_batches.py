"""How many batches a loader's workers have made ahead of the loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter


def ready_batches(iterator: Iterator[Any]) -> int | None:
    """Batches of a DataLoader's ``iterator`` that are made and not taken; 0 without workers.

    None of an iterator that is not torch's own, or where its queues do not tell (macOS). Takes microseconds, and waits
    for nobody. What is read is private to torch (2.8 to 2.15): batches in the workers' queue, with pinned memory in a
    second one, and those that came before their turn.
    """
    if type(iterator) is _SingleProcessDataLoaderIter:
        return 0
    if type(iterator) is not _MultiProcessingDataLoaderIter:
        return None
    queues = {id(queue): queue for queue in (iterator._worker_result_queue, iterator._data_queue)}
    try:
        waiting = sum(queue.qsize() for queue in queues.values())
    except NotImplementedError:
        return None
    return waiting + sum(len(task) == 2 for task in iterator._task_info.values())
