"""Finds the lines of the program that take the time of a loader's workers.

A worker is a process of its own. If it is forked, it inherits what this module replaces in torch: it follows the code
of one of its batches, and sends the times of the lines to the training process through a pipe.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from torch.utils.data import get_worker_info

from lm_profiler.callbacks.instruments.instrument import Instrument
from lm_profiler.callbacks.instruments.python_time import PythonTimes
from lm_profiler.measure.boundary import Guard
from lm_profiler.measure.clocks import tape
from lm_profiler.measure.counts.replaced_method import replaced_method
from lm_profiler.record.run_record import PythonTime
from lm_profiler.torch_names import ITERABLE_FETCHER, MAP_FETCHER

# stands in the record for the phase of these lines: workers run beside all phases
_WORKERS = "workers"
# The number of the first worker's batch that is followed. Its first batch fills caches; the second one is usually
# loaded before the measured steps begin.
_FOLLOWED_BATCH = 2
# A message of this size is written to a pipe at once (PIPE_BUF is at least 4,096 on Linux), so that messages of several
# workers do not mix.
_MOST_BYTES = 4096
_READ_BYTES = 1 << 16  # the size of a pipe
_ID_BYTES = 8  # the size of the identity of a dataset
_MOST_DATASETS = 8  # the most datasets of which a batch is followed


class WorkerCode:
    """Follows the code of workers that are forked between ``install`` and ``restore``."""

    def __init__(self) -> None:
        self._undo = ExitStack()
        self._process = 0  # the training process, while workers are followed; else 0
        # the descriptors of the pipe's ends
        self._reader = 0
        self._writer = 0
        # the number of batches that this process has loaded as a worker
        self._batches = 0
        self._messages = b""  # what workers have sent
        # the identities of the datasets of which a batch was followed; workers share this memory
        self._followed = mmap.mmap(-1, _ID_BYTES * _MOST_DATASETS)

    def install(self) -> None:
        """Make workers that start from now on send the times of their lines; do nothing if they do already."""
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        self._batches = 0
        self._messages = b""
        self._followed[:] = bytes(len(self._followed))
        self._reader, self._writer = os.pipe()
        # A worker must never wait for the training process.
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._undo.callback(os.close, self._reader)
        self._undo.callback(os.close, self._writer)
        for name in (MAP_FETCHER, ITERABLE_FETCHER):
            fetcher = name.find_or(None)
            if fetcher is not None:
                following_fetch = self._following(fetcher.fetch)
                self._undo.enter_context(
                    replaced_method(fetcher, "fetch", following_fetch)
                )

    def _following(self, fetch: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``fetch``, which loads a batch, with its code followed in a worker if that is due."""
        # our errors are no reason for a worker to fail, and there is nobody to report them to
        guard = Guard("lines of workers", lambda note: None)

        def fetch_in_worker(*args: Any, **kwargs: Any) -> Any:
            times = guard.run(self._start_if_due)
            try:
                return fetch(*args, **kwargs)
            finally:
                if times is not None:
                    guard.run(self._send, times)

        return fetch_in_worker

    def restore(self) -> None:
        """Restore torch, and keep what the workers have sent."""
        if self._process != os.getpid():
            return
        self._receive()
        self._process = 0
        self._undo.close()

    def _start_if_due(self) -> PythonTimes | None:
        """Start to follow the code if the next batch of the first worker is ``_FOLLOWED_BATCH``; else return None."""
        worker = get_worker_info()
        # after ``restore``, or in a worker that a worker has started, the pipe is not ours
        is_own_worker = os.getppid() == self._process
        if worker is None or worker.id != 0 or not is_own_worker:
            return None
        self._batches += 1
        if self._batches != _FOLLOWED_BATCH or not self._claim(id(worker.dataset)):
            return None
        guard = Guard("lines of workers", lambda note: None)
        # Only the lines are sent to the training process.
        times = PythonTimes(
            lambda: tape.DATA,
            time.perf_counter_ns,
            guard=guard,
            compares_results=False,
        )
        return times if times.start() else None

    def _claim(self, dataset_id: int) -> bool:
        """Return whether no batch of the dataset was followed yet, and note that one is followed now.

        Workers of an earlier epoch, or of another loader, may have followed one.
        """
        with memoryview(self._followed) as memory, memory.cast("Q") as followed_ids:
            for slot, followed_id in enumerate(followed_ids):
                if followed_id == dataset_id:
                    return False
                if followed_id == 0:
                    followed_ids[slot] = dataset_id
                    return True
        return False

    def _send(self, times: PythonTimes) -> None:
        times.stop()
        worker = get_worker_info()
        assert worker is not None
        # a full pipe, or one that the training process has closed, is no reason to fail
        with suppress(OSError):
            os.write(self._writer, _message_of(times.shares(), id(worker.dataset)))

    def _receive(self) -> None:
        with suppress(BlockingIOError):
            self._messages += os.read(self._reader, _READ_BYTES)

    def times(self, loader: Any) -> list[PythonTime]:
        """Return the times of the lines in a batch of ``loader``, the longest first; empty if no worker has sent them.

        Other loaders, as for validation, have other datasets. If ``loader`` is None, the only message counts.
        """
        if self._process == os.getpid():
            self._receive()
        messages = [json.loads(line) for line in self._messages.splitlines()]
        if loader is not None:
            dataset_id = id(getattr(loader, "dataset", None))
            messages = [
                message for message in messages if message["dataset"] == dataset_id
            ]
        if len(messages) != 1:
            return []
        return [PythonTime.model_validate(row) for row in messages[0]["rows"]]


def _message_of(rows: Sequence[PythonTime], dataset_id: int) -> bytes:
    """Return a line of JSON with the dataset and as many of the ``rows`` as a message may hold."""
    sent_rows: list[dict[str, Any]] = []
    content = {"dataset": dataset_id, "rows": sent_rows}
    message = json.dumps(content).encode() + b"\n"
    for row in rows:
        sent_rows.append({**row.model_dump(exclude={"forward"}), "phase": _WORKERS})
        longer_message = json.dumps(content).encode() + b"\n"
        if len(longer_message) > _MOST_BYTES:
            break
        message = longer_message
    return message


WORKER_CODE = WorkerCode()  # of this process


class WorkerLines(Instrument):
    """Keeps what the workers have sent until the measured steps end."""

    name = "lines of workers"
    stage = "measure"

    def __init__(self, loader: Callable[[], Any]) -> None:
        self._loader = loader  # returns the loop's loader; None if it is unknown

    def result(self) -> Mapping[str, Any]:
        """Return the times of the lines; workers that start from now on send none."""
        times = WORKER_CODE.times(self._loader())
        WORKER_CODE.restore()
        return {"worker_times": times}

    def discard(self) -> None:
        WORKER_CODE.restore()
