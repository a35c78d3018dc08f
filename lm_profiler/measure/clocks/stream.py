"""The device's clock: a pool of timing events on the current stream, and a stopwatch for work outside of training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch


class EventStream:
    """Timing events on the current stream of ``device``. They are reused, so a long run creates few of them.

    Only ``wait`` synchronizes. If a call fails because the device died, times are unknown; only ``wait`` raises. So the
    user sees the error of the program's own call. The times of events during the capture of a CUDA graph are unknown
    too: nothing runs then, and querying any event would invalidate the capture.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.Event] = []
        index = cast("int | None", device.index)
        if index is None:
            index = torch.accelerator.current_device_index()
        self._current: Callable[[], Any] = partial(
            torch.accelerator.current_stream, index
        )
        # returns whether a CUDA graph is being captured, so that what is enqueued does not run now
        self.capturing: Callable[[], bool] = lambda: False
        if device.type == "cuda":
            self.capturing = torch.cuda.is_current_stream_capturing

    def record(self) -> torch.Event:
        """Enqueue an event after all work so far, and return it; takes a microsecond and never waits."""
        event = (
            self._free.pop()
            if self._free
            else torch.Event(device=self._device, enable_timing=True)
        )
        try:
            if not self.capturing():
                # The stream is passed because without it the event would go to the current device, maybe another one.
                event.record(self._current())
                return event
        except (RuntimeError, ValueError):
            pass
        # an event that is never recorded, so that no time can be read from it
        return torch.Event(device=self._device, enable_timing=True)

    def reached(self, event: torch.Event) -> bool:
        """Return whether the stream has reached ``event``; False if that cannot be known."""
        try:
            return not self.capturing() and bool(event.query())
        except (RuntimeError, ValueError):
            return False

    def seconds(self, start: torch.Event, end: torch.Event) -> float | None:
        """Return the seconds between two events that the stream has reached; None if one cannot be read."""
        try:
            # elapsed_time is in milliseconds
            return float(start.elapsed_time(end)) * 1e-3
        except (RuntimeError, ValueError):
            return None

    def release(self, events: Sequence[torch.Event]) -> None:
        """Make the events available to ``record`` again."""
        self._free.extend(events)

    def wait(self) -> None:
        """Wait until the device has done all that was enqueued; raise RuntimeError if it died."""
        torch.accelerator.synchronize(self._device)


def stream_of(device: torch.device) -> EventStream | None:
    """Return the clock of ``device``; None on the CPU and where a device cannot time events."""
    if device.type == "cpu":
        return None
    try:
        stream = EventStream(device)
        start, end = stream.record(), stream.record()
        stream.wait()
    except Exception:  # each backend has its own error for missing events
        return None
    if stream.seconds(start, end) is None:
        return None
    stream.release((start, end))
    return stream


class Stopwatch:
    """Times work on ``device``, and waits for it: by its events if it has any, or else by ``clock`` (ns)."""

    def __init__(
        self, device: torch.device, clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self._device = device
        self._clock = clock
        self._stream = stream_of(device)

    def __call__(self, work: Callable[[], object]) -> float:
        """Return the seconds that ``work`` takes on the device, until it has ended there."""
        if self._stream is None:
            self._synchronize()
            start_ns = self._clock()
            work()
            self._synchronize()
            return (self._clock() - start_ns) * 1e-9
        start = self._stream.record()
        work()
        end = self._stream.record()
        self._stream.wait()
        seconds = self._stream.seconds(start, end)
        self._stream.release((start, end))
        if seconds is None:
            raise RuntimeError("the device's clock cannot be read")
        return seconds

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
