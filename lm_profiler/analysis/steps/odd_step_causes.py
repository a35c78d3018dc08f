"""Why a step was slow: which of the counters that are read between steps explains what it took beyond the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import fmean, median
from typing import Any

from lm_profiler.record.quantities import counted, duration_text
from lm_profiler.record.run_record import OddStep, StepCounters
from lm_profiler.record.steps import StepRow

EXPLAINED = 0.5  # the share of a step's excess over the median that a cause must explain
_TOLD = 0.1  # the share of the same excess below which a counter is not told

_COUNTS = {
    "major_faults": ("major page fault", "major page faults"),
    "minor_faults": ("page fault", "page faults"),
    "involuntary_switches": ("involuntary switch", "involuntary switches"),
    "alloc_retries": ("retry of the allocator", "retries of the allocator"),
    "new_segments": ("new segment", "new segments"),
}
_FEWEST = {"minor_faults": 1000}  # more of them than usual, to be worth a word: each takes a microsecond

_SECONDS = {
    "asleep_s": "asleep",
    "cpu_wait_s": "waiting for a CPU",
    "gc_s": "collecting garbage",
    "compile_s": "compiling",
    "cpu_s": "CPU time",
    "system_s": "in the kernel",
}

NO_CPU = "waiting for a CPU"  # the cause that is another program's
_EMPTY_QUEUE, _LOADER, _CHECKPOINT = "the loader's queue was empty", "the loader", "a checkpoint"
_GARBAGE, _COMPILING = "garbage collection", ("compilation", "recompilation")

_FIGURES = tuple(set(StepCounters.model_fields) - {"step", "rank", "gc_generation", "compiled", "throttled"})


@dataclass(frozen=True)
class _Rank:
    """The readings of one rank's measured steps."""

    counters: dict[int, StepCounters]
    usual: StepCounters
    data_s: dict[int, float]  # how long the loop waited for its batch, on the host

    def beyond(self, name: str, step: int) -> float:
        """Return by how much ``name`` is more than usual in ``step``; 0 where that is unknown."""
        now, usual = getattr(self.counters[step], name), getattr(self.usual, name)
        return 0.0 if now is None or usual is None else max(now - usual, 0.0)

    def inside(self, name: str, step: int) -> float:
        """Return the same of seconds, less what may have passed between steps."""
        return max(self.beyond(name, step) - self.beyond("between_s", step), 0.0)

    def data_beyond(self, step: int) -> float:
        return max(self.data_s[step] - median(self.data_s.values()), 0.0) if step in self.data_s else 0.0


def with_causes(
    odd: Sequence[OddStep], rows: Sequence[StepRow], counters: Sequence[StepCounters], workers: int | None
) -> tuple[list[OddStep], list[StepCounters]]:
    """Return ``odd`` with what explains each step, by all ranks' rows and counters, and the counters that say so."""
    data_s: defaultdict[int, dict[int, float]] = defaultdict(dict)
    own: defaultdict[int, list[StepCounters]] = defaultdict(list)
    for row in rows if odd else ():
        data_s[row.rank][row.step] = row.time("data", "host")
    for each in counters if odd else ():
        own[each.rank].append(each)
    ranks = {
        rank: _Rank(
            {each.step: each for each in read if each.step is not None}, _of_all(rank, read, median), data_s[rank]
        )
        for rank, read in sorted(own.items())
    }
    told = [_explained(step, ranks, workers) for step in odd]
    named = sorted({step.rank for step in told if step.rank is not None})
    slow = [ranks[step.rank].counters[step.step] for step in told if step.rank is not None]
    return told, [*(ranks[rank].usual for rank in named), *slow]


def explained_by(
    odd: OddStep,
    now: StepCounters,
    usual: StepCounters,
    data_s: tuple[float, float],
    workers: int | None,
) -> OddStep:
    """Return ``odd`` with what explains it: the counters of this step, or of a level, and the usual ones.

    ``data_s`` is how long a step usually waits for its batch, and how long this one did.
    """
    usual_data_s, now_data_s = data_s
    waits_s = {odd.step: now_data_s, -1: usual_data_s, -2: usual_data_s}  # the median of which is the usual one
    return _explained(odd, {0: _Rank({odd.step: now}, usual, waits_s)}, workers)


def usual_counters(counters: Sequence[StepCounters]) -> StepCounters:
    """Return the median of each figure over readings of one rank."""
    return _of_all(counters[0].rank, counters, median)


def counters_per_step(counters: Sequence[StepCounters]) -> StepCounters:
    """Return the mean of each figure over the steps that the readings are of, of which each may have several."""
    first, last = counters[0].step or 0, counters[-1].step or 0
    share = (len(counters) - 1) / max(last - first, 1)
    mean = _of_all(counters[0].rank, counters, fmean)
    kept = {"sm_clock_hz": 1.0, "wall_s": 1.0, "between_s": 0.0}  # the time before a reading is that of other steps
    scaled = {name: value * kept.get(name, share) for name in _FIGURES if (value := getattr(mean, name)) is not None}
    collected, compiled = (max(counters, key=lambda each: getattr(each, of) or 0.0) for of in ("gc_s", "compile_s"))
    throttled = next((each.throttled for each in reversed(counters) if each.throttled), None)
    named = {"gc_generation": collected.gc_generation, "compiled": compiled.compiled, "throttled": throttled}
    return mean.model_copy(update={**scaled, **named})


def mean_counters(counters: Sequence[StepCounters], rank: int = 0) -> StepCounters | None:
    """Return the mean of each figure over the steps of ``rank``, as far as known, and what was compiled longest."""
    own = [each for each in counters if each.rank == rank]
    if not own:
        return None
    longest = max(own, key=lambda each: each.compile_s or 0.0)
    return _of_all(rank, own, fmean).model_copy(update={"compiled": longest.compiled})


def _of_all(rank: int, counters: Sequence[StepCounters], of: Callable[[list[Any]], Any]) -> StepCounters:
    figures: dict[str, Any] = {}
    for name in _FIGURES:
        values = [value for each in counters if (value := getattr(each, name)) is not None]
        figures[name] = float(of(values)) if values else None
    return StepCounters(rank=rank, **figures)


def has_own_finding(cause: str | None) -> bool:
    """Return whether a finding of its own is about ``cause``, or it is another program's."""
    return cause is not None and cause.startswith((NO_CPU, _EMPTY_QUEUE, _LOADER, _CHECKPOINT, _GARBAGE, *_COMPILING))


def _explained(odd: OddStep, ranks: dict[int, _Rank], workers: int | None) -> OddStep:
    excess_s = odd.step_s - odd.step_s / odd.ratio if odd.ratio else 0.0
    ranks = {number: rank for number, rank in ranks.items() if odd.step in rank.counters}
    if excess_s <= 0.0 or not ranks:  # faster than the others: nothing happened to it
        return odd
    seen = {number: max(_causes(rank, odd, workers), key=itemgetter(1)) for number, rank in ranks.items()}
    number = max(seen, key=lambda each: seen[each][1])
    what, seconds = seen[number]
    if seconds >= EXPLAINED * excess_s:
        return odd.model_copy(update={"cause": what, "cause_s": min(seconds, excess_s), "rank": number})
    number = max(ranks, key=lambda each: ranks[each].beyond("wall_s", odd.step))
    return odd.model_copy(update={"beside": _beside(ranks[number], odd.step, excess_s), "rank": number})


def _causes(rank: _Rank, odd: OddStep, workers: int | None) -> list[tuple[str, float]]:
    """Return what may have held ``odd`` up, each with the seconds that it explains."""
    step, counters = odd.step, rank.counters[odd.step]
    causes = [
        (f"{_GARBAGE} of generation {counters.gc_generation}", rank.beyond("gc_s", step)),
        (_compilation(counters.compiled), rank.beyond("compile_s", step)),
        (NO_CPU, rank.inside("cpu_wait_s", step)),
        (counted(round(counters.minor_faults or 0), "page fault"), rank.inside("fault_s", step)),
        (_throttled(counters), _by_clock(rank, odd)),
        (_CHECKPOINT, rank.beyond("checkpoint_s", step)),
    ]
    data_s = rank.data_beyond(step)
    if workers and counters.asleep_s is not None:
        return [*causes, (_EMPTY_QUEUE, min(data_s, rank.inside("asleep_s", step)))]
    rest_s = data_s - sum(seconds for _, seconds in causes)
    return [*causes, (_LOADER + " (num_workers=0)" * (workers == 0), max(rest_s, 0.0))]


def _compilation(what: str | None) -> str:
    return f"{'recompilation' if what and '): ' in what else 'compilation'} of {what or 'a backward pass'}"


def _throttled(counters: StepCounters) -> str:
    reasons = f" ({', '.join(counters.throttled)})" if counters.throttled else ""
    return f"the GPU's clock at {(counters.sm_clock_hz or 0.0) * 1e-6:,.0f} MHz{reasons}"


def _by_clock(rank: _Rank, odd: OddStep) -> float:
    """Seconds by which the median step takes longer at this step's clock than at the usual one, if all of it does."""
    now, usual = rank.counters[odd.step].sm_clock_hz, rank.usual.sm_clock_hz
    return max(odd.step_s / odd.ratio * (usual / now - 1.0), 0.0) if now and usual else 0.0


def _beside(rank: _Rank, step: int, excess_s: float) -> str:
    """Return the counters that differ: seconds by how many more, counts as they are."""
    told = []
    for name, words in _SECONDS.items():
        if (more_s := rank.inside(name, step)) >= _TOLD * excess_s:
            told.append(f"{duration_text(more_s)} more {words}")
    outside = rank.beyond("between_s", step) >= _TOLD * excess_s  # then nobody knows what was counted where
    for name, (one, several) in _COUNTS.items() if not outside else ():
        if (more := rank.beyond(name, step)) > (getattr(rank.usual, name) or 0.0) and more >= _FEWEST.get(name, 1):
            count = round(getattr(rank.counters[step], name))
            told.append(f"{count:,} {one if count == 1 else several}")
    return ", ".join(told)
