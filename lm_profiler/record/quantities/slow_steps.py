"""Slow steps: what differed in each, and what was counted while it ran."""

from __future__ import annotations

from dataclasses import replace

from lm_profiler.record.quantities.quantity import Place, at, figure

ODD_STEP_ROW = (
    figure("step", "step", "count", "a step far from the others"),
    figure("step_s", "time", "ms", "what it took"),
    figure("ratio", "ratio", "x", "over what the other steps let expect"),
    figure("part", "part", "text", "what differed most from its own level"),
    figure("excess_s", "excess", "ms", "by how much it did"),
    figure("cause", "cause", "text", "what explains at least half of it"),
    figure("cause_s", "explained", "ms", "how much of it that explains"),
    figure("beside", "no cause, but", "text", "what differs where no cause is seen"),
    figure("rank", "rank", "count", "the rank that the cause is of"),
)
COUNTERS_ROW = (
    figure("step", "step", "count", "an odd step; none: the median of all"),
    figure("rank", "rank", "count", "whose counters these are"),
    figure("wall_s", "time", "ms", "of the step, on the host"),
    figure("between_s", "before", "ms", "from the step before to this one"),
    figure("gc_s", "garbage", "ms", "in collections of garbage"),
    figure("gc_generation", "generation", "count", "of the longest of them"),
    figure("compile_s", "compiling", "ms", "in torch.compile"),
    figure("compiled", "compiled", "text", "what, and why"),
    figure("cpu_wait_s", "no CPU", "ms", "the training thread was ready and had no CPU"),
    figure("asleep_s", "asleep", "ms", "the training thread was neither running nor ready"),
    figure("cpu_s", "CPU", "ms", "CPU time of the process"),
    figure("system_s", "kernel", "ms", "of it in the kernel"),
    figure("fault_s", "faults", "ms", "the most that page faults took"),
    figure("minor_faults", "minor faults", "count", "pages of memory mapped"),
    figure("major_faults", "major faults", "count", "pages read from a disk"),
    figure("voluntary_switches", "switches", "count", "how often a thread waited for something"),
    figure("involuntary_switches", "involuntary", "count", "how often a thread lost a CPU it still wanted"),
    figure("alloc_retries", "retries", "count", "how often the allocator had to free its cache"),
    figure("new_segments", "segments", "count", "how often the allocator asked the driver for memory"),
    figure("sm_clock_hz", "SM clock", "MHz", "of the GPU, during the step"),
    figure("throttled", "throttled", "text", "what held that clock back"),
)

MEAN_COUNTERS = tuple(
    replace(
        of,
        name=f"mean_{of.name}",
        title=f"{of.title}, on average",
        path=f"mean_counters.{of.path}",
        get=at(f"mean_counters.{of.path}"),
        place=Place.ASKED,
    )
    for of in COUNTERS_ROW
    if of.name not in ("step", "rank")
)
