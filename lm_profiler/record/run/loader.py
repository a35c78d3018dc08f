"""The loader whose batches were measured."""

from __future__ import annotations

from lm_profiler.record.run.part import Part


class LoaderFacts(Part):
    """Of rank 0's loader: its ``workers``, how many batches these may make before somebody takes one (``ahead``), and
    how many they had, where the measured steps began and where they ended. None where it does not say.

    Where fewer are left at the end, the steps lived on what was made before them, and a longer run's are slower.
    """

    workers: int | None
    ahead: int | None
    ready_before: int | None
    ready_after: int | None

    @property
    def used_up(self) -> int | None:
        """Batches that the measured steps took and that were not made meanwhile; None is unknown."""
        if self.ready_before is None or self.ready_after is None:
            return None
        return max(self.ready_before - self.ready_after, 0)
