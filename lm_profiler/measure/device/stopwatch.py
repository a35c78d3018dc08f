"""Times a piece of work on a device, after the run."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lm_profiler.measure.clocks.stream import stream_of


class Stopwatch:
    """Times work on ``device`` by the device's events where it has them, else by ``clock``; waits for the device.

    Args:
        device: the device on which the work runs.
        clock: the host's clock, in nanoseconds.
    """

    def __init__(self, device: torch.device, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._device = device
        self._clock = clock
        self._stream = stream_of(device)

    def __call__(self, work: Callable[[], object]) -> float:
        """Run ``work`` once, and return its seconds."""
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
