"""The loader whose batches were measured."""

from __future__ import annotations

from lm_profiler.record.figure import figure
from lm_profiler.record.run.part import Part


class LoaderFacts(Part):
    """Of rank 0's loader: its ``workers``, how many batches these may make before somebody takes one (``ahead``), and
    how many they had, where the measured steps began and where they ended. None where it does not say.

    Where fewer are left at the end, the steps lived on what was made before them, and a longer run's are slower.
    """

    workers: int | None = figure("workers of the loader", "count", "processes that make batches", "loader_workers")
    ahead: int | None = figure(
        "batches made ahead at most", "count", "by its workers, before one is taken", "loader_ahead"
    )
    ready_before: int | None = figure(
        "batches ready at first", "count", "made and not taken where the measured steps began"
    )
    ready_after: int | None = figure(
        "batches ready at last", "count", "made and not taken where the measured steps ended"
    )

    @property
    def used_up(self) -> int | None:
        """Batches that the measured steps took and that were not made meanwhile; None is unknown."""
        if self.ready_before is None or self.ready_after is None:
            return None
        return max(self.ready_before - self.ready_after, 0)
