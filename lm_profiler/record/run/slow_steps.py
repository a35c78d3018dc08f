"""Steps far from the others: what they took, what was read meanwhile, and what that explains."""

from __future__ import annotations

from collections.abc import Iterable

from lm_profiler.record.figure import figure
from lm_profiler.record.run.part import Part


class OddStep(Part):
    """A measured step far from the others: in total ``step_s``, ``ratio`` times what the others let expect.

    ``part`` is what differed most from its own level, by ``excess_s``. ``cause`` explains at least half of what the
    step took beyond that, by ``cause_s``; None where nothing does, or the step was faster than the others.
    ``beside`` says, where no cause is seen, which counters differ. ``rank`` is the one that ``cause`` or ``beside`` is
    of; None where nothing was read.
    """

    step: int = figure("step", "count", "a step far from the others")
    step_s: float = figure("time", "ms", "what it took")
    ratio: float = figure("ratio", "x", "over what the other steps let expect")
    part: str = figure("part", "text", "what differed most from its own level")
    excess_s: float = figure("excess", "ms", "by how much it did")
    cause: str | None = figure("cause", "text", "what explains at least half of it", default=None)
    cause_s: float | None = figure("explained", "ms", "how much of it that explains", default=None)
    beside: str | None = figure("no cause, but", "text", "what differs where no cause is seen", default=None)
    rank: int | None = figure("rank", "count", "the rank that the cause is of", default=None)


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

    step: int | None = figure("step", "count", "an odd step; none: the median of all", default=None)
    rank: int = figure("rank", "count", "whose counters these are", default=0)
    wall_s: float | None = figure("time", "ms", "of the step, on the host", default=None)
    between_s: float | None = figure("before", "ms", "from the step before to this one", default=None)
    gc_s: float | None = figure("garbage", "ms", "in collections of garbage", default=None)
    gc_generation: int | None = figure("generation", "count", "of the longest of them", default=None)
    compile_s: float | None = figure("compiling", "ms", "in torch.compile", default=None)
    compiled: str | None = figure("compiled", "text", "what, and why", default=None)
    cpu_wait_s: float | None = figure("no CPU", "ms", "the training thread was ready and had no CPU", default=None)
    asleep_s: float | None = figure("asleep", "ms", "the training thread was neither running nor ready", default=None)
    cpu_s: float | None = figure("CPU", "ms", "CPU time of the process", default=None)
    system_s: float | None = figure("kernel", "ms", "of it in the kernel", default=None)
    fault_s: float | None = figure("faults", "ms", "the most that page faults took", default=None)
    minor_faults: float | None = figure("minor faults", "count", "pages of memory mapped", default=None)
    major_faults: float | None = figure("major faults", "count", "pages read from a disk", default=None)
    voluntary_switches: float | None = figure(
        "switches", "count", "how often a thread waited for something", default=None
    )
    involuntary_switches: float | None = figure(
        "involuntary", "count", "how often a thread lost a CPU it still wanted", default=None
    )
    alloc_retries: float | None = figure(
        "retries", "count", "how often the allocator had to free its cache", default=None
    )
    new_segments: float | None = figure(
        "segments", "count", "how often the allocator asked the driver for memory", default=None
    )
    sm_clock_hz: float | None = figure("SM clock", "MHz", "of the GPU, during the step", default=None)
    throttled: list[str] | None = figure("throttled", "text", "what held that clock back", default=None)
