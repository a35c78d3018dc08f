"""Reads what DistributedDataParallel knows of its reducer: the buckets, and the times of a backward's communication.

DDP times every hundredth step unless it is told to time each. On CUDA, reading the times waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

from torch.nn.parallel import DistributedDataParallel

from lm_profiler.torch_names import DDP_TIMES, DDP_TIMES_RATE

# ``kDDPRuntimeLoggingSampleRate`` of torch's ``reducer.cpp``, to go back to: the current rate cannot be read
_USUAL_RATE = 100


class ReducerReading(NamedTuple):
    """The communication of one backward, in seconds, and how much of it was hidden behind computing.

    ``backward`` is the number of the backward pass, the same on all ranks.
    """

    backward: int
    communication_s: float
    hidden_s: float


class ReducerTimer:
    """Times every backward of ``ddp`` from ``start`` to ``stop``.

    DDP collects the times of a backward when the next forward begins, so a reading is of the previous step.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._begun = -1
        self.readings: list[ReducerReading] = []

    def start(self) -> None:
        """Time each step from the next one on."""
        self._begun = DDP_TIMES.of(self._ddp)().get("backward_comm_time_start", -1)
        DDP_TIMES_RATE.of(self._ddp)(1)

    def read(self) -> None:
        """Keep the last backward's times, if they are new. Not for a timed step: it may wait for the device."""
        known = DDP_TIMES.of(self._ddp)()
        begun = known.get("backward_comm_time_start", -1)
        if begun == self._begun:  # nothing new: the backward before `start`, or one that was read
            return
        self._begun = begun
        took_ns, hidden_ns = known["backward_comm_time"], known["backward_compute_comm_overlap_time"]
        self.readings.append(ReducerReading(known["iteration"], took_ns * 1e-9, min(max(hidden_ns, 0), took_ns) * 1e-9))

    def stop(self) -> None:
        """Restore DDP's usual rate; calling it twice does no harm."""
        DDP_TIMES_RATE.of(self._ddp)(_USUAL_RATE)


def reduces_in_backward(wrapped: object) -> bool:
    """Return whether gradients are exchanged while backward goes on, so that only the last exchange is waited for.

    So DDP does. A wrapper that says when it finishes may say otherwise (``training.data_parallel``).
    """
    if isinstance(wrapped, DistributedDataParallel):
        return True
    return bool(getattr(wrapped, "reduces_in_backward", hasattr(wrapped, "finish_gradient_synchronization")))


def bucket_bytes(wrapped: object) -> list[int] | None:
    """Return the bytes of DDP's buckets, in the order in which it reduces them. Not for a timed step.

    None where ``wrapped`` is no DDP, where it has not yet decided on its buckets, or where a communication hook of the
    user's may send anything.
    """
    if not isinstance(wrapped, DistributedDataParallel):
        return None
    known = DDP_TIMES.of(wrapped)()
    if known.get("comm_hook"):
        return None
    told = known.get("rebuilt_bucket_sizes") if known.get("has_rebuilt_buckets") else None
    if told is None and wrapped.find_unused_parameters:  # then DDP never rebuilds its first buckets
        told = known.get("bucket_sizes")
    return [int(size) for size in told.split(",")] if told else None
