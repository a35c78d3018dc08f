"""Removes the time for which the training thread waited for a CPU from the steps.

The operating system counts this time per step, and not per part. But other programs delay single steps and parts, which
are then longer than in the other steps nearby: the time is taken from what they are longer by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lm_profiler.analysis.watch.step_blocks import BLOCK, Seconds, StepNumbers
from lm_profiler.record.parts import TIMED
from lm_profiler.record.run_record import StepCounters

# the last steps, from which it is known how long a part is without waiting: it is so long in this quantile of them
_NEARBY = 5 * BLOCK
_UNDELAYED = 0.25
_LEAST_SHARE_LEFT = 0.1  # of a part: the counter and the clock may differ
_LEAST_S = 1e-9  # shorter sums count as this, to divide by them


@dataclass(eq=False)
class CpuWaits:
    """Removes waiting for a CPU from the steps of a run as they arrive."""

    # (n, TIMED) the last steps of earlier calls
    _last_seconds: Seconds = field(default_factory=lambda: np.empty((0, len(TIMED))))
    _last_reading: int = 0  # the step after which counters were last read

    def remove(
        self, steps: StepNumbers, seconds: Seconds, counters: Sequence[StepCounters]
    ) -> Seconds:
        """Return the (n, TIMED) ``seconds`` of the next ``steps`` without the waiting that ``counters`` hold.

        A reading of counters holds the waiting since the reading before it, in one step or several.
        """
        parts_s = seconds[:, :-1]
        delays_s = self._delays_s(seconds)
        # (n, PARTS) without waiting
        left_s = parts_s.copy()
        for reading in counters:
            if reading.step is None:
                continue
            first_step = self._last_reading + 1
            end_step = reading.step + 1
            self._last_reading = reading.step
            first_row, end_row = np.searchsorted(steps, [first_step, end_step])
            if reading.cpu_wait_s and first_row < end_row:
                # The steps of the reading that came with an earlier call have their share of its waiting.
                share = (end_row - first_row) / (end_step - first_step)
                rows = slice(first_row, end_row)
                left_s[rows] = _without(
                    parts_s[rows], delays_s[rows], share * reading.cpu_wait_s
                )
        left_s = np.maximum(left_s, _LEAST_SHARE_LEFT * parts_s)
        last_seconds = np.concatenate([self._last_seconds, seconds])
        self._last_seconds = last_seconds[-_NEARBY:]
        return np.column_stack([left_s, left_s.sum(axis=1)])

    def _delays_s(self, seconds: Seconds) -> Seconds:
        """Return (n, PARTS) by how much each part is longer than it is without waiting in the steps nearby."""
        known_s = np.concatenate([self._last_seconds, seconds])[:, :-1]
        delays_s = np.zeros((len(seconds), known_s.shape[1]))
        for begin in range(0, len(seconds), BLOCK):
            block_s = seconds[begin : begin + BLOCK, :-1]
            end_of_known = len(self._last_seconds) + begin + len(block_s)
            nearby_s = known_s[max(end_of_known - _NEARBY, 0) : end_of_known]
            undelayed_s = np.quantile(nearby_s, _UNDELAYED, axis=0)
            # If the program has just lengthened a part, all steps of the block are longer than most steps nearby.
            undelayed_s = np.maximum(undelayed_s, block_s.min(axis=0))
            delays_s[begin : begin + BLOCK] = np.maximum(block_s - undelayed_s, 0.0)
        return delays_s


def _without(parts_s: Seconds, delays_s: Seconds, waited_s: float) -> Seconds:
    """Return (n, PARTS) ``parts_s`` without ``waited_s``, which are taken from their delays, and then from all."""
    share_of_delays = waited_s / max(float(delays_s.sum()), _LEAST_S)
    left_s = parts_s - min(share_of_delays, 1.0) * delays_s
    still_waited_s = waited_s - float((parts_s - left_s).sum())
    share_of_rest = still_waited_s / max(float(left_s.sum()), _LEAST_S)
    return left_s * (1.0 - min(share_of_rest, 1.0))
