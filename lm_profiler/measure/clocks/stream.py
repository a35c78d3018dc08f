"""The device's clock: pooled timing events on its current stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch


class EventStream:
    """Events of ``torch.Event`` on the current stream of ``device``, recycled: a long run makes a bounded number.

    Never synchronizes but in ``wait``. A call that fails (on a device that died) makes the times that need it unknown,
    lest a mark takes the place of the user's own error; ``wait`` alone says so. So are instants within the capture of
    a CUDA graph: nothing runs then, and to query an event, whichever it is, would spoil the user's capture.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.Event] = []
        index = cast("int | None", device.index)
        if index is None:
            index = torch.accelerator.current_device_index()
        self._current: Callable[[], Any] = partial(torch.accelerator.current_stream, index)
        capturing = torch.cuda.is_current_stream_capturing
        self.capturing: Callable[[], bool] = capturing if device.type == "cuda" else lambda: False
        """Whether what is enqueued now becomes part of a CUDA graph, in place of running."""

    def record(self) -> torch.Event:
        """An instant at the end of what has been enqueued so far; costs a microsecond and waits for nothing."""
        event = self._free.pop() if self._free else torch.Event(device=self._device, enable_timing=True)
        try:
            if not self.capturing():
                # Without a stream the event would go to that of the current device, which may be another.
                event.record(self._current())
                return event
        except (RuntimeError, ValueError):
            pass
        return torch.Event(device=self._device, enable_timing=True)  # never recorded: no time can be read from it

    def reached(self, instant: torch.Event) -> bool:
        """Whether the stream has got there; not, where that cannot be known."""
        try:
            return not self.capturing() and bool(instant.query())
        except (RuntimeError, ValueError):
            return False

    def seconds(self, start: torch.Event, end: torch.Event) -> float | None:
        """Seconds between two instants that were reached; None where one of them cannot be read."""
        try:
            return float(start.elapsed_time(end)) * 1e-3  # elapsed_time is in milliseconds
        except (RuntimeError, ValueError):
            return None

    def release(self, instants: Sequence[torch.Event]) -> None:
        """Hand instants back for reuse."""
        self._free.extend(instants)

    def wait(self) -> None:
        """Block until the device has done all that was enqueued.

        Raises:
            RuntimeError: the device died.
        """
        torch.accelerator.synchronize(self._device)


def stream_of(device: torch.device) -> EventStream | None:
    """The clock of ``device``; None on the CPU and where a device cannot time events (host time is all there is)."""
    if device.type == "cpu":
        return None
    try:
        stream = EventStream(device)
        start, end = stream.record(), stream.record()
        stream.wait()
    except Exception:  # each backend says in its own way that it has none
        return None
    if stream.seconds(start, end) is None:
        return None
    stream.release((start, end))
    return stream
