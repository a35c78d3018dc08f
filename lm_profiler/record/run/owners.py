"""Whose the time is that no phase covers."""

from __future__ import annotations

from typing import Annotated

from lm_profiler.record.figure import Figure, figure
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

    owner: str = figure("owner", "text", "whose code ran: a class, Lightning, or lm_profiler")
    action: str = figure("action", "text", "hook, method, or a word for several")
    seconds: float = figure("time", "ms", "of a mean step, without other actions inside of it")
    calls: float = figure("calls", "number", "in a mean step")
    in_steps: int = figure("in steps", "count", "of the steps that were timed by action, those in which it took time")
    least_s: float | None = figure(
        "at least", "ms", "in the step where it took least, over the share of such steps", default=None
    )

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

    phase: str = figure("phase", "text", "where in the step")
    file: str = figure("file", "text", "of the program")
    line: int = figure("line", "count", "its number")
    function: str = figure("function", "text", "what it is in")
    what: str = figure("what", "text", "what took it: python, torch, library, a package, or a function of C")
    seconds: float = figure("time", "ms", "of the line's own, in one step")
    calls: int = figure("calls", "count", "how often it was entered in that step")


class BetweenSteps(Part):
    """What passed between measured steps: ``validation``, a ``checkpoint``, the turn of an ``epoch``, ``instruments``.

    It took ``seconds`` in all, in so many ``times``. A checkpoint that is saved amid a step is in here too, and in that
    step's ``other``.
    """

    what: str = figure("what passed", "text", "between measured steps")
    seconds: float = figure("time", "ms", "what it took in all")
    times: int = figure("times", "count", "how often")


ASLEEP = Figure("asleep", "ms", "the training thread slept, or waited for something else than a CPU")


class ThreadUse(Part):
    """What the training thread did in a phase of a mean step.

    It ran for ``ran_s`` seconds, was ready and had no CPU for ``no_cpu_s``, and slept or waited for something else in
    the rest of ``wall_s``.
    """

    wall_s: float
    ran_s: float = figure("ran", "ms", "the training thread ran")
    no_cpu_s: float = figure("no CPU", "ms", "the training thread was ready and had no CPU")

    @property
    def asleep_s(self) -> Annotated[float, ASLEEP]:
        """Neither running nor ready to run."""
        return max(self.wall_s - self.ran_s - self.no_cpu_s, 0.0)


class OtherByOwner(Part):
    """``other`` by whose it is, of rank 0, on the host's clock: ``seconds`` of a mean step of ``steps`` that were timed
    action by action, after the measured ones. The ``actions``, the longest first, add up to it.

    Timing every action takes time itself, most of which is an action of ``lm_profiler``. ``measured_s`` is without: the
    mean ``other`` of the measured steps of this rank, on the same clock.
    """

    steps: int = figure("steps timed by action", "count", "steps of which each action was timed", "owner_steps")
    seconds: float = figure(
        "other, timed by action", "ms", "mean of other in those steps, on the host's clock", "owned_other_s"
    )
    measured_s: float | None = figure(
        "other of rank 0",
        "ms",
        "mean of other in the measured steps of rank 0, on the host's clock",
        "rank_0_other_s",
        default=None,
    )
    actions: list[OwnedTime]
