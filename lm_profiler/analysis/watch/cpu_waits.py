"""Takes the time for which the training thread waited for a CPU out of its steps.

Beside other programs, a step of 8 ms may take 15. The program itself got no slower, and a real change of it is hidden
among such steps. So levels are judged without this time; where the time itself changes, that is an event of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.watch.level_change import LevelChange
from lm_profiler.analysis.watch.levels import LevelFollower
from lm_profiler.record.parts import TIMED
from lm_profiler.record.run_record import StepCounters

_LEAST_SHARE_LEFT = 0.1  # of a step: a reading may hold waiting of steps before it
# of the time, from which on the waiting itself is followed
_SHARE_WORTH_FOLLOWING = 0.02
_STEPS_BEFORE = 2000  # that are followed from the start on, as the level before


@dataclass(eq=False)
class CpuWaits:
    """Takes waiting out of steps as they come, and follows the level of the steps that have it in them."""

    _last_reading_step: int = 0
    _follower: LevelFollower | None = None  # None until the waiting is worth it
    _steps: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    _seconds: NDArray[np.float64] = field(
        default_factory=lambda: np.empty((0, len(TIMED)))
    )

    def remove(
        self,
        steps: NDArray[np.int64],
        seconds: NDArray[np.float64],
        counters: Sequence[StepCounters],
    ) -> NDArray[np.float64]:
        """Return the (n, TIMED) ``seconds`` of ``steps`` without waiting.

        A reading holds the waiting since the reading before it. Its steps share it by their length, and so do the
        parts of a step: how much of it each part had is unknown.
        """
        share_left = np.ones(len(steps))
        for reading in counters:
            if reading.step is None:
                continue
            begin = int(np.searchsorted(steps, self._last_reading_step + 1))
            end = int(np.searchsorted(steps, reading.step + 1))
            self._last_reading_step = reading.step
            read_s = float(seconds[begin:end, -1].sum())
            if read_s > 0.0 and reading.cpu_wait_s:
                waiting_share = reading.cpu_wait_s / read_s
                share_left[begin:end] = max(1.0 - waiting_share, _LEAST_SHARE_LEFT)
        without_waiting = seconds * share_left[:, None]
        self._follow(steps, seconds, float(without_waiting[:, -1].sum()))
        return without_waiting

    def _follow(
        self,
        steps: NDArray[np.int64],
        seconds: NDArray[np.float64],
        seconds_without_waiting: float,
    ) -> None:
        """Follow the steps with their waiting, once there is enough of it: a quiet machine costs nothing."""
        if self._follower is not None:
            self._follower.add(steps, seconds)
            return
        self._steps = np.concatenate([self._steps, steps])[-_STEPS_BEFORE:]
        self._seconds = np.concatenate([self._seconds, seconds])[-_STEPS_BEFORE:]
        least_s = (1.0 - _SHARE_WORTH_FOLLOWING) * float(seconds[:, -1].sum())
        if seconds_without_waiting < least_s:
            self._follower = LevelFollower()
            self._follower.add(self._steps, self._seconds)

    def forget_unfinished(self) -> None:
        """Forget the steps that fill no block yet, because steps are left out after them."""
        if self._follower is not None:
            self._follower.forget_unfinished()

    def finish(self) -> None:
        if self._follower is not None:
            self._follower.finish()

    def take_changed(self) -> list[LevelChange]:
        """Return changes of the level with waiting; which of them are of waiting is for others to judge."""
        if self._follower is None:
            return []
        return self._follower.take_changed()
