"""Whether memory that a run had not is a passing shortage: what another program holds for a moment, or too much ever.

Pure.
"""

from __future__ import annotations

from lm_profiler.improve.ran import RanCell
from lm_profiler.record.run import RunRecord

_SHORT = ("refused", "oom", "interrupted")
"""The last is what a process was killed by: where memory is out, the system does so too."""


class MemorySeen:
    """What the runs of a search have had, and which settings it was enough for."""

    def __init__(self) -> None:
        self._most: int | None = None
        self._fitted: set[str] = set()

    def saw(self, setting: str, done: RanCell) -> None:
        """A cell of ``setting`` has run."""
        if done.outcome.status == "ok":
            self._fitted.add(setting)
        free = _free(done.entry.record)
        if free is not None:
            self._most = max(free, self._most or 0)

    def has_fitted(self, setting: str) -> bool:
        """Whether a cell of ``setting`` has ended well."""
        return setting in self._fitted

    def is_passing(self, setting: str, done: RanCell) -> bool:
        """Whether the same run may well fit another time.

        It fitted before; or what it needed was free when another run began. Of the first of all nobody knows better.
        """
        if done.outcome.status not in _SHORT:
            return False
        if self.has_fitted(setting):
            return True
        if not self._fitted:
            return not _is_more_than_there_is(done.entry.record)
        needed = None if done.outcome.status == "interrupted" else _needed(done.entry.record)
        return needed is not None and self._most is not None and needed <= self._most


def _is_more_than_there_is(record: RunRecord | None) -> bool:
    needed = _needed(record)
    there_is = None if record is None or record.environment is None else record.environment.device_bytes
    return needed is not None and there_is is not None and needed > there_is


def _free(record: RunRecord | None) -> int | None:
    return None if record is None or record.planned is None else record.planned.available


def _needed(record: RunRecord | None) -> int | None:
    """Bytes: where it ran out of memory what it had and asked for then, else what was planned."""
    if record is None:
        return None
    failure = record.failure
    said = None if failure is None else failure.out_of_memory
    if said is not None:
        return None if said.allocated is None or said.requested is None else said.allocated + said.requested
    return None if record.planned is None or record.status != "refused" else record.planned.peak
