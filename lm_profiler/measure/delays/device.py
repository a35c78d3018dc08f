"""Delays on a CUDA device's stream: a kernel that counts clock cycles and does nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lm_profiler.measure.clocks.stream import EventStream
from lm_profiler.torch_names import SLEEP

_CYCLES = 10_000_000
"""Of the calibration: about 6 ms at 1.7 GHz. How long a delay really was is measured each time, so that a clock which
changes meanwhile does no harm."""


class DeviceDelays:
    """On the current stream of ``stream``'s device, calibrated when it is made, which waits for the device.

    Args:
        stream: the device's clock.
        sleep: keeps the device busy for so many of its cycles; torch's own where it is None.

    Raises:
        NameMissing: this torch cannot do that.
    """

    def __init__(self, stream: EventStream, sleep: Callable[[int], object] | None = None) -> None:
        sleep = sleep or SLEEP.find()
        self._stream, self._sleep = stream, sleep
        sleep(_CYCLES // 10)  # the first launch is slow
        start, end = self._delay(_CYCLES)
        stream.wait()
        seconds = stream.seconds(start, end)
        stream.release((start, end))
        if not seconds:
            raise RuntimeError("the device's delay cannot be timed")
        self._cycles_per_s = _CYCLES / seconds
        self._taken: list[tuple[int | None, Any, Any]] = []

    def take(self, delay_s: float, key: int | None) -> None:
        """Delay what is enqueued from now on; ``key`` says later which delay it was, None that nobody asks.

        Never within the capture of a CUDA graph, all of whose replays would be delayed.
        """
        if self._stream.capturing():
            return
        self._taken.append((key, *self._delay(max(1, round(delay_s * self._cycles_per_s)))))

    def settle(self) -> None:
        """Wait for the device, but not within a capture, which that would spoil: the host has no lead any more."""
        if not self._stream.capturing():
            self._stream.wait()

    def taken(self) -> list[tuple[int, float]]:
        """Key and seconds of each delay since this was last asked, for which it waits."""
        self._stream.wait()
        delays, self._taken = self._taken, []
        known = [(key, self._stream.seconds(start, end)) for key, start, end in delays]
        for _, start, end in delays:
            self._stream.release((start, end))
        return [(key, seconds) for key, seconds in known if key is not None and seconds is not None]

    def _delay(self, cycles: int) -> tuple[Any, Any]:
        start = self._stream.record()
        self._sleep(cycles)
        return start, self._stream.record()
