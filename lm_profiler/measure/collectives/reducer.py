"""What DistributedDataParallel tells of its reducer: its buckets, and when a backward's communication begins and ends.

It times that in every hundredth step unless it is told to do it in each. On CUDA its reading waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

from torch.nn.parallel import DistributedDataParallel

from lm_profiler.torch_names import DDP_TIMES, DDP_TIMES_RATE

_USUAL_RATE = 100
"""``kDDPRuntimeLoggingSampleRate`` of torch's ``reducer.cpp``: nothing tells what rate was set."""


class ReducerReading(NamedTuple):
    """One backward: from the beginning of its communication to the end, and how much of that its computing hid; in
    seconds. ``backward`` counts those of this process, the same on all ranks."""

    backward: int
    communication_s: float
    hidden_s: float


class ReducerTimer:
    """Samples every backward of ``ddp`` from ``start`` to ``stop``.

    DDP takes in what it timed of a backward where the next forward begins, so a reading is of the step before.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._begun = -1
        self.readings: list[ReducerReading] = []

    def start(self) -> None:
        """From the next step on."""
        self._begun = DDP_TIMES.of(self._ddp)().get("backward_comm_time_start", -1)
        DDP_TIMES_RATE.of(self._ddp)(1)

    def read(self) -> None:
        """Keep the last backward that is known of, if it is a new one. Not for a timed step."""
        known = DDP_TIMES.of(self._ddp)()
        begun = known.get("backward_comm_time_start", -1)
        if begun == self._begun:  # the one before the first
            return
        self._begun = begun
        took_ns, hidden_ns = known["backward_comm_time"], known["backward_compute_comm_overlap_time"]
        self.readings.append(ReducerReading(known["iteration"], took_ns * 1e-9, min(max(hidden_ns, 0), took_ns) * 1e-9))

    def stop(self) -> None:
        """As it was before. May be called twice."""
        DDP_TIMES_RATE.of(self._ddp)(_USUAL_RATE)


def bucket_bytes(wrapped: object) -> list[int] | None:
    """Of DDP's buckets, in the order in which it reduces them. Not for a timed step.

    None where ``wrapped`` is no DDP, it has not told yet how it divides its gradients, or a hook of the user's sends
    what it likes.
    """
    if not isinstance(wrapped, DistributedDataParallel):
        return None
    known = DDP_TIMES.of(wrapped)()
    if known.get("comm_hook"):
        return None
    told = known.get("rebuilt_bucket_sizes") if known.get("has_rebuilt_buckets") else None
    if told is None and wrapped.find_unused_parameters:  # those it keeps as they are
        told = known.get("bucket_sizes")
    return [int(size) for size in told.split(",")] if told else None
