"""One rank's steps on rank 0's clock: which phase it was in, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.ranks.timeline import Instants, RankTimeline
from lm_profiler.record.parts import PARTS

OUTSIDE = len(PARTS)
"""The code of what lies in no step."""

BACKWARD = PARTS.index("backward")


@dataclass(frozen=True)
class Track:
    """Marks of the steps that all ranks have, on rank 0's clock. Codes of what is outside of them are ``OUTSIDE``.

    ``step`` is the index of the step that each mark lies in; ``first`` where each begins, and the count of marks.
    """

    marks_ns: Instants
    codes: NDArray[np.uint8]
    step: NDArray[np.int64]
    first: NDArray[np.int64]

    @staticmethod
    def of(timeline: RankTimeline, steps: Instants) -> Track:
        """Of ``steps``, which ``timeline`` has."""
        counts = np.diff(timeline.first)
        kept = np.isin(timeline.steps, steps)
        of_step = np.repeat(kept, counts)
        codes = timeline.codes.copy()
        codes[timeline.first[1:] - 1] = OUTSIDE  # a step's last mark ends it
        first = np.concatenate([[0], np.cumsum(counts[kept])])
        marks_ns = timeline.clock.on_first(timeline.host_ns[of_step])
        return Track(marks_ns, codes[of_step], np.repeat(np.arange(len(steps)), counts[kept]), first)

    @property
    def begin_ns(self) -> Instants:
        """Of each step."""
        return self.marks_ns[self.first[:-1]]

    @property
    def end_ns(self) -> Instants:
        """Of each step."""
        return self.marks_ns[self.first[1:] - 1]

    def at(self, instants: Instants) -> NDArray[np.int64]:
        """The last mark at or before each instant; the first mark for what is earlier."""
        return np.maximum(np.searchsorted(self.marks_ns, instants, "right") - 1, 0)

    def spent_ns(self) -> NDArray[np.float64]:
        """[step, part]: how long each took."""
        cells = self.step[:-1] * (OUTSIDE + 1) + self.codes[:-1]
        spent = np.bincount(cells, np.diff(self.marks_ns), len(self.begin_ns) * (OUTSIDE + 1))
        return np.asarray(spent.reshape(-1, OUTSIDE + 1)[:, :OUTSIDE], dtype=np.float64)

    def in_part_until_ns(self, code: int, instants: Instants) -> NDArray[np.float64]:
        """How long it was in a part up to each instant, from its first mark on."""
        lasted = np.diff(self.marks_ns) * (self.codes[:-1] == code)
        # Relative to the first mark: instants since boot have no room for nanoseconds in a float.
        zero = self.marks_ns[0]
        until = np.concatenate([[0.0], np.cumsum(lasted)])
        return np.asarray(np.interp(instants - zero, self.marks_ns - zero, until))
