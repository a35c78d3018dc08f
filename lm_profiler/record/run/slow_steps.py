"""Steps far from the others: what they took, what was read meanwhile, and what that explains."""

from __future__ import annotations

from collections.abc import Iterable

from lm_profiler.record.run.part import Part


class OddStep(Part):
    """A measured step far from the others: in total ``step_s``, ``ratio`` times what the others let expect.

    ``part`` is what differed most from its own level, by ``excess_s``. ``cause`` explains at least half of what the
    step took beyond that, by ``cause_s``; None where nothing does, or the step was faster than the others.
    ``beside`` says, where no cause is seen, which counters differ. ``rank`` is the one that ``cause`` or ``beside`` is
    of; None where nothing was read.
    """

    step: int
    step_s: float
    ratio: float
    part: str
    excess_s: float
    cause: str | None = None
    cause_s: float | None = None
    beside: str | None = None
    rank: int | None = None


def worst_first(odd: Iterable[OddStep]) -> list[OddStep]:
    """The slowest first; after them those that were faster than the others, the farthest first."""
    return sorted(odd, key=lambda step: (step.ratio < 1, -abs(step.ratio - 1)))


class StepCounters(Part):
    """What was read of one measured step of one rank; ``step`` None: the median of that rank's measured steps.

    ``gc_s`` was spent in collections of garbage, the longest of which was of ``gc_generation``; ``compile_s`` in
    torch.compile, of ``compiled``. The training thread was ready and had no CPU for ``cpu_wait_s``, and neither ready
    nor running for ``asleep_s``. All threads of the process had the CPU for ``cpu_s``, of which ``system_s`` in the
    kernel; ``fault_s`` is the most of it that page faults took. Counters are read between steps, so they hold the
    ``between_s`` before the step too. ``sm_clock_hz`` is the GPU's clock during the step, and ``throttled`` what held
    it back. None where this machine does not say.
    """

    step: int | None = None
    rank: int = 0
    wall_s: float | None = None
    between_s: float | None = None
    gc_s: float | None = None
    gc_generation: int | None = None
    compile_s: float | None = None
    compiled: str | None = None
    cpu_wait_s: float | None = None
    asleep_s: float | None = None
    cpu_s: float | None = None
    system_s: float | None = None
    fault_s: float | None = None
    minor_faults: float | None = None
    major_faults: float | None = None
    voluntary_switches: float | None = None
    involuntary_switches: float | None = None
    alloc_retries: float | None = None
    new_segments: float | None = None
    sm_clock_hz: float | None = None
    throttled: list[str] | None = None
