"""The device's clock: pooled timing events on its current stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class EventStream:
    """Events of ``torch.Event`` on the current stream of ``device``, recycled: a long run makes a bounded number.

    Never synchronizes but in ``wait``. On a device that died every call fails; here ``wait`` alone says so, lest a mark
    takes the place of the user's own error.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.Event] = []

    def record(self) -> torch.Event:
        event = self._free.pop() if self._free else torch.Event(device=self._device, enable_timing=True)
        try:  # noqa: SIM105  a mark has no time for `suppress`
            event.record()
        except RuntimeError:
            pass
        return event

    def reached(self, instant: torch.Event) -> bool:
        try:
            return bool(instant.query())
        except RuntimeError:
            return False

    def seconds(self, start: torch.Event, end: torch.Event) -> float:
        return float(start.elapsed_time(end)) * 1e-3  # elapsed_time is in milliseconds

    def release(self, instants: Sequence[torch.Event]) -> None:
        self._free.extend(instants)

    def wait(self) -> None:
        """Block until the device has done all that was enqueued."""
        torch.accelerator.synchronize(self._device)


def stream_of(device: torch.device) -> EventStream | None:
    """The clock of ``device``; None on the CPU and where a device cannot time events (host time is all there is)."""
    if device.type == "cpu":
        return None
    stream = EventStream(device)
    try:
        start, end = stream.record(), stream.record()
        stream.wait()
        stream.seconds(start, end)
    except RuntimeError:
        return None
    stream.release((start, end))
    return stream
