"""Delays a CUDA device's stream by a kernel that spins for a number of clock cycles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lm_profiler.measure.clocks.stream import EventStream
from lm_profiler.torch_names import SLEEP

# Cycles of the calibration: about 6 ms at 1.7 GHz. Each delay's real length is measured, so that a clock rate that
# changes later does no harm.
_CYCLES = 10_000_000


class DeviceDelays:
    """Delays on the current stream of ``stream``'s device. The constructor calibrates, and waits for the device.

    Args:
        stream: the device's clock.
        sleep: keeps the device busy for a number of cycles; None for torch's own function.

    Raises:
        NameMissing: This torch lacks that function.
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
        """Delay what is enqueued from now on; ``key`` names the delay in ``taken``, None leaves it out.

        Does nothing within the capture of a CUDA graph: each replay would be delayed.
        """
        if self._stream.capturing():
            return
        self._taken.append((key, *self._delay(max(1, round(delay_s * self._cycles_per_s)))))

    def settle(self) -> None:
        """Wait for the device, so that the host is not ahead; not within a capture, which that would invalidate."""
        if not self._stream.capturing():
            self._stream.wait()

    def taken(self) -> list[tuple[int, float]]:
        """Wait for the device; return key and seconds of each delay since the last call."""
        self._stream.wait()
        delays, self._taken = self._taken, []
        known = [(key, self._stream.seconds(start, end)) for key, start, end in delays]
        for _, start, end in delays:
            self._stream.release((start, end))
        return [(key, seconds) for key, seconds in known if key is not None and seconds is not None]

    def _delay(self, cycles: int) -> tuple[Any, Any]:
        """Enqueue a delay, and return the instants before and after it."""
        start = self._stream.record()
        self._sleep(cycles)
        return start, self._stream.record()
