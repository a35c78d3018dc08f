"""Whose the time is that no phase covers."""

from __future__ import annotations

from lm_profiler.record.run.part import Part

LIGHTNING = "Lightning"
"""The owner of what Lightning itself does in its loops."""

OURS = "lm_profiler"
"""The owner of what these instruments cost."""


class OwnedTime(Part):
    """One action in ``other``. ``seconds`` and ``calls`` are of a mean step; it took time in ``in_steps`` of the steps.

    ``least_s`` is the least that it took in one of these steps, times their share of all. ``owner`` is a class of a
    callback, module, logger or strategy, ``Lightning``, ``lm_profiler``, or empty for an action that somebody named
    himself; ``action`` its hook, method, or a word for several. Time of another action inside of it is that one's.
    """

    owner: str
    action: str
    seconds: float
    calls: float
    in_steps: int
    least_s: float | None = None

    @property
    def name(self) -> str:
        """``LearningRateMonitor.on_train_batch_start``, ``Lightning's loop``."""
        between = "" if not self.owner else "'s " if self.owner in (LIGHTNING, OURS) else "."
        return self.owner + between + self.action


class PythonTime(Part):
    """A line of the program in one step, in ``phase``: ``seconds`` of its own in ``what``, entered ``calls`` times.

    ``what`` is ``python``, ``torch`` (operators that the line calls itself), ``library`` (Python of torch's), another
    package by its name, or a function of C by its name, such as ``time.sleep``. Operators that torch's own modules call
    are not in here.
    """

    phase: str
    file: str
    line: int
    function: str
    what: str
    seconds: float
    calls: int


class BetweenSteps(Part):
    """What passed between measured steps: ``validation``, a ``checkpoint``, the turn of an ``epoch``, ``instruments``.

    It took ``seconds`` in all, in so many ``times``. A checkpoint that is saved amid a step is in here too, and in that
    step's ``other``.
    """

    what: str
    seconds: float
    times: int


class ThreadUse(Part):
    """What the training thread did in a phase of a mean step.

    It ran for ``ran_s`` seconds, was ready and had no CPU for ``no_cpu_s``, and slept or waited for something else in
    the rest of ``wall_s``.
    """

    wall_s: float
    ran_s: float
    no_cpu_s: float

    @property
    def asleep_s(self) -> float:
        """Neither running nor ready to run."""
        return max(self.wall_s - self.ran_s - self.no_cpu_s, 0.0)


class OtherByOwner(Part):
    """``other`` by whose it is, of rank 0, on the host's clock: ``seconds`` of a mean step of ``steps`` that were timed
    action by action, after the measured ones. The ``actions``, the longest first, add up to it.

    Timing every action takes time itself, most of which is an action of ``lm_profiler``. ``measured_s`` is without: the
    mean ``other`` of the measured steps of this rank, on the same clock.
    """

    steps: int
    seconds: float
    measured_s: float | None = None
    actions: list[OwnedTime]
