"""Whose the time is that no phase covers."""

from __future__ import annotations

from lm_profiler.record.run.part import Part

LIGHTNING = "Lightning"
"""The owner of what Lightning itself does in its loops."""

OURS = "lm_profiler"
"""The owner of what these instruments cost."""


class OwnedTime(Part):
    """One action in ``other``. ``seconds`` and ``calls`` are of a mean step; it took time in ``in_steps`` of the steps.

    ``owner`` is a class of a callback, module, logger or strategy, ``Lightning``, ``lm_profiler``, or empty for an
    action that somebody named himself; ``action`` its hook, method, or a word for several. Time of another action
    inside of it is that one's.
    """

    owner: str
    action: str
    seconds: float
    calls: float
    in_steps: int

    @property
    def name(self) -> str:
        """``LearningRateMonitor.on_train_batch_start``, ``Lightning's loop``."""
        between = "" if not self.owner else "'s " if self.owner in (LIGHTNING, OURS) else "."
        return self.owner + between + self.action


class OtherByOwner(Part):
    """``other`` by whose it is, of rank 0, on the host's clock: ``seconds`` of a mean step of ``steps`` that were timed
    action by action, after the measured ones. The ``actions``, the longest first, add up to it.

    Timing every action takes time itself, most of which is an action of ``lm_profiler``. ``measured_s`` is without: the
    median ``other`` of the measured steps of this rank, on the same clock.
    """

    steps: int
    seconds: float
    measured_s: float | None = None
    actions: list[OwnedTime]
