"""Finds the lines of the program that take the time of a loader's workers.

A worker is a process of its own. If it is forked, it inherits what this module replaces in torch: it follows the code
of one of its batches, and sends the times of the lines to the training process through a pipe.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from torch.utils.data import get_worker_info

from lm_profiler.callbacks.instruments.instrument import Instrument
from lm_profiler.callbacks.instruments.python_time import PythonTimes
from lm_profiler.measure.boundary import Guard
from lm_profiler.measure.clocks import tape
from lm_profiler.measure.counts.replaced_method import replaced_method
from lm_profiler.record.run_record import PythonTime
from lm_profiler.torch_names import ITERABLE_FETCHER, MAP_FETCHER

_WORKERS = "workers"  # in place of the phase: workers run beside all phases
# Of the first worker: its first batch fills caches, and this one is usually loaded before the measured steps begin.
_FOLLOWED_BATCH = 2
# A message of this size is written to a pipe at once (PIPE_BUF is at least 4,096 on Linux), so that those of several
# workers do not mix.
_MOST_BYTES = 4096
_READ_BYTES = 1 << 16  # the size of a pipe


class WorkerCode:
    """Follows the code of workers that are forked between ``install`` and ``restore``."""

    def __init__(self) -> None:
        self._undo = ExitStack()
        self._process = 0
        self._reader = 0  # the ends of the pipe
        self._writer = 0
        self._batches = 0  # that this process has loaded as a worker
        self._messages = b""

    def install(self) -> None:
        """Make workers that start from now on send the times of their lines; do nothing if they do already."""
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        self._batches = 0
        self._messages = b""
        self._reader, self._writer = os.pipe()
        # A worker must never wait for the training process.
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._undo.callback(os.close, self._reader)
        self._undo.callback(os.close, self._writer)
        for name in (MAP_FETCHER, ITERABLE_FETCHER):
            fetcher = name.find_or(None)
            if fetcher is not None:
                fetch = fetcher.fetch

                def fetch_in_worker(
                    *args: Any, _fetch: Callable[..., Any] = fetch, **kwargs: Any
                ) -> Any:
                    return self._fetch(partial(_fetch, *args, **kwargs))

                self._undo.enter_context(
                    replaced_method(fetcher, "fetch", fetch_in_worker)
                )

    def restore(self) -> None:
        """Restore torch, and keep what the workers have sent."""
        if self._process != os.getpid():
            return
        self._receive()
        self._process = 0
        self._undo.close()

    def _fetch(self, fetch: Callable[[], Any]) -> Any:
        """Return the batch that ``fetch`` loads; follow its code if it is the right batch of the first worker."""
        worker = get_worker_info()
        if worker is None or worker.id != 0:
            return fetch()
        self._batches += 1
        if self._batches != _FOLLOWED_BATCH:
            return fetch()
        # our errors are no reason for a worker to fail, and there is nobody to report them to
        guard = Guard("lines of workers", lambda note: None)
        times = PythonTimes(lambda: tape.DATA, time.perf_counter_ns, guard=guard)
        has_started = guard.run(self._start_first, times, otherwise=False)
        if not has_started:
            return fetch()
        try:
            return fetch()
        finally:
            guard.run(self._send, times)
            guard.run(times.stop)

    def _start_first(self, times: PythonTimes) -> bool:
        """Start to follow a batch; return False if a worker of an earlier epoch has sent its times already."""
        has_messages = bool(select.select([self._reader], [], [], 0.0)[0])
        return not has_messages and times.start()

    def _send(self, times: PythonTimes) -> None:
        times.stop()
        # a full pipe, or one that the training process has closed, is no reason to fail
        with suppress(OSError):
            os.write(self._writer, _message_of(times.shares()))

    def _receive(self) -> None:
        with suppress(BlockingIOError):
            self._messages += os.read(self._reader, _READ_BYTES)

    def times(self) -> list[PythonTime]:
        """Return the times of the lines in a batch, the longest first; empty if no worker has sent them."""
        if self._process == os.getpid():
            self._receive()
        messages = self._messages.splitlines()
        if not messages:
            return []
        return [PythonTime.model_validate(fields) for fields in json.loads(messages[0])]


def _message_of(rows: Sequence[PythonTime]) -> bytes:
    """Return a line of JSON with as many of the ``rows`` as a message may hold."""
    kept: list[dict[str, Any]] = []
    message = b"[]\n"
    for row in rows:
        kept.append({**row.model_dump(exclude={"forward"}), "phase": _WORKERS})
        longer_message = json.dumps(kept).encode() + b"\n"
        if len(longer_message) > _MOST_BYTES:
            break
        message = longer_message
    return message


WORKER_CODE = WorkerCode()  # that of this process


class WorkerLines(Instrument):
    """Keeps what the workers have sent until the measured steps end."""

    name = "lines of workers"
    stage = "measure"

    def result(self) -> Mapping[str, Any]:
        """Return the times of the lines; workers that start from now on send none."""
        times = WORKER_CODE.times()
        WORKER_CODE.restore()
        return {"worker_times": times}

    def discard(self) -> None:
        WORKER_CODE.restore()
