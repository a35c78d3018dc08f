"""Finds why a step was slow: which counter, read between steps, explains its excess over the usual step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from lm_profiler.record.counter_table import FIGURES, CounterTable, counters_of
from lm_profiler.record.quantities import count_text, duration_text
from lm_profiler.record.run_record import NO_CPU, OddStep, StepCounters
from lm_profiler.record.steps import StepRow

# A cause must explain this share of a step's excess over the median step.
EXPLAINED = 0.5
_LEAST_REPORTED_SHARE = 0.1  # without a cause, a counter is reported if it differs by this share of the excess

# counters that are reported as a count: the singular and the plural of what they count
_COUNT_WORDS = {
    "major_faults": ("major page fault", "major page faults"),
    "minor_faults": ("page fault", "page faults"),
    "involuntary_switches": ("involuntary switch", "involuntary switches"),
    "alloc_retries": ("retry of the allocator", "retries of the allocator"),
    "new_segments": ("new segment", "new segments"),
}
# the fewest additional events that are reported, if more than one: a page fault takes only a microsecond
_FEWEST_EXTRA = {"minor_faults": 1000}

_SECONDS_WORDS = {
    "asleep_s": "asleep",
    "cpu_wait_s": "waiting for a CPU",
    "gc_s": "collecting garbage",
    "compile_s": "compiling",
    "cpu_s": "CPU time",
    "system_s": "in the kernel",
}

_EMPTY_QUEUE = "the loader's queue was empty"
_LOADER = "the loader"
_CHECKPOINT = "a checkpoint"
GARBAGE = "garbage collection"
_FIRST_STEP = "the first step of an epoch"
_COMPILATION = "compilation"
_RECOMPILATION = "recompilation"
_CAUSES_WITH_FINDING = (
    NO_CPU,
    _EMPTY_QUEUE,
    _LOADER,
    _CHECKPOINT,
    GARBAGE,
    _COMPILATION,
    _RECOMPILATION,
    _FIRST_STEP,
)


@dataclass(frozen=True)
class _RankReadings:
    """The readings of one rank's measured steps."""

    counters: dict[int, StepCounters]  # the counters of each step, by its number
    usual: StepCounters  # the usual value of each counter
    data_s: dict[int, float]  # by step, how long the host waited for its batch
    usual_data_s: float

    def excess(self, name: str, step: int) -> float:
        """Return by how much the counter ``name`` exceeds its usual value in ``step``; 0 if unknown."""
        value = getattr(self.counters[step], name)
        usual_value = getattr(self.usual, name)
        if value is None or usual_value is None:
            return 0.0
        excess: float = value - usual_value
        return max(excess, 0.0)

    def excess_in_step(self, name: str, step: int) -> float:
        """Return the excess of a counter of seconds, without the time that may have been counted between steps."""
        between_steps_s = self.excess("between_s", step)
        return max(self.excess(name, step) - between_steps_s, 0.0)

    def data_excess_s(self, step: int) -> float:
        """Return how much longer than usual ``step`` waited for its batch; 0 if unknown."""
        data_s = self.data_s.get(step, self.usual_data_s)
        return max(data_s - self.usual_data_s, 0.0)


@dataclass(frozen=True)
class _Cause:
    """A possible cause of a slow step."""

    words: str
    seconds: float  # the seconds of the step that it explains


def with_causes(
    odd: Sequence[OddStep],
    rows: Sequence[StepRow],
    counters: Sequence[StepCounters],
    workers: int | None,
    first_steps: Sequence[int] = (),
    new_workers: int = 0,
) -> tuple[list[OddStep], list[StepCounters]]:
    """Explain odd steps by the counters of all ranks.

    Args:
        odd: the steps to explain.
        rows: the rows of all ranks.
        counters: the readings of all ranks.
        workers: the number of loader workers; None if unknown.
        first_steps: the steps that begin an epoch.
        new_workers: how many workers the loader starts for each epoch.

    Returns:
        ``odd`` with their causes; and the counters that show these: first the usual counters of the ranks to which the
        causes belong, then the counters of the odd steps.
    """
    if not odd:
        return [], []
    ranks = _readings_by_rank(rows, counters)
    are_first_steps_slow = _are_first_steps_slow(odd, rows, first_steps)
    explained_steps: list[OddStep] = []
    for step in odd:
        explained_step = _with_main_cause(step, ranks, workers)
        is_first_step = step.step in first_steps
        if explained_step.cause is None and is_first_step and are_first_steps_slow:
            explained_step = _with_epoch_as_cause(explained_step, new_workers)
        explained_steps.append(explained_step)
    blamed_ranks: set[int] = set()
    slow_counters: list[StepCounters] = []
    for step in explained_steps:
        if step.rank is not None:
            blamed_ranks.add(step.rank)
            slow_counters.append(ranks[step.rank].counters[step.step])
    usual = [ranks[rank].usual for rank in sorted(blamed_ranks)]
    return explained_steps, usual + slow_counters


def _readings_by_rank(
    rows: Sequence[StepRow], counters: Sequence[StepCounters]
) -> dict[int, _RankReadings]:
    """Return the readings of each rank that has counters, in the order of ranks."""
    data_s: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for row in rows:
        data_s[row.rank][row.step] = row.time("data", "host")
    counters_by_rank: defaultdict[int, list[StepCounters]] = defaultdict(list)
    for reading in counters:
        counters_by_rank[reading.rank].append(reading)

    ranks: dict[int, _RankReadings] = {}
    for rank, readings in sorted(counters_by_rank.items()):
        by_step = {}
        for reading in readings:
            if reading.step is not None:
                by_step[reading.step] = reading
        waits_s = data_s[rank]
        ranks[rank] = _RankReadings(
            counters=by_step,
            usual=usual_counters(CounterTable.from_counters(readings)),
            data_s=waits_s,
            usual_data_s=median(waits_s.values()) if waits_s else 0.0,
        )
    return ranks


def explained_by(
    odd: OddStep,
    counters: StepCounters,
    usual: StepCounters,
    data_s: tuple[float, float],
    workers: int | None,
) -> OddStep:
    """Return ``odd``, a step or a level of steps, with its cause.

    Args:
        odd: what to explain.
        counters: its counters.
        usual: the usual counters.
        data_s: how long a step usually waits for its batch, and how long this one did.
        workers: the number of loader workers; None if unknown.
    """
    usual_data_s, odd_data_s = data_s
    rank = _RankReadings(
        counters={odd.step: counters},
        usual=usual,
        data_s={odd.step: odd_data_s},
        usual_data_s=usual_data_s,
    )
    return _with_main_cause(odd, {0: rank}, workers)


def usual_counters(counters: CounterTable) -> StepCounters:
    """Return the median of each figure over readings of one rank."""
    return counters_of(counters.median(), counters.rank)


def counters_per_step(counters: CounterTable) -> StepCounters:
    """Return the mean of each figure per step, from readings that may be several steps apart.

    Most figures of a reading are sums over all steps since the reading before it.
    """
    steps = int(counters.steps[-1] - counters.steps[0])
    readings_per_step = (len(counters) - 1) / max(steps, 1)
    # The clock rate and the time of the step itself are not such sums. The time between steps is not part of a step.
    special_factors = {"sm_clock_hz": 1.0, "wall_s": 1.0, "between_s": 0.0}
    factors = [special_factors.get(name, readings_per_step) for name in FIGURES]

    throttled = None
    for step in counters.steps.tolist():
        throttled = counters.labels.get(step, {}).get("throttled") or throttled
    return counters_of(
        counters.mean() * np.array(factors),
        counters.rank,
        gc_generation=counters.label_of_largest("gc_generation", "gc_s"),
        compiled=counters.label_of_largest("compiled", "compile_s"),
        throttled=throttled,
    )


def mean_counters(
    counters: Sequence[StepCounters], rank: int = 0
) -> StepCounters | None:
    """Return the mean of each figure over the steps of ``rank``, with the function whose compilation took longest.

    None if the rank has no counters.
    """
    table = CounterTable.from_counters(
        [reading for reading in counters if reading.rank == rank]
    )
    if not len(table):
        return None
    compiled = table.label_of_largest("compiled", "compile_s")
    return counters_of(table.mean(), rank, compiled=compiled)


def has_own_finding(cause: str | None) -> bool:
    """Return whether ``cause`` has a finding of its own, or is due to another program."""
    return cause is not None and cause.startswith(_CAUSES_WITH_FINDING)


def _with_main_cause(
    odd: OddStep, ranks: dict[int, _RankReadings], workers: int | None
) -> OddStep:
    """Return ``odd`` with the cause that explains most of its excess, over all ranks.

    If no cause explains half of it, return it with the counters that differ on the rank whose step took longest. A step
    that is faster than usual is returned unchanged.
    """
    excess_s = odd.step_s - _usual_s(odd)
    if excess_s <= 0.0:
        return odd
    # by rank, the cause that explains most
    main_causes: dict[int, _Cause] = {}
    for rank, readings in ranks.items():
        if odd.step in readings.counters:
            causes = _possible_causes(readings, odd, workers)
            main_causes[rank] = max(causes, key=lambda cause: cause.seconds)
    if not main_causes:
        return odd
    blamed_rank = max(main_causes, key=lambda rank: main_causes[rank].seconds)
    cause = main_causes[blamed_rank]
    if cause.seconds >= EXPLAINED * excess_s:
        cause_s = min(cause.seconds, excess_s)
        blame = {"cause": cause.words, "cause_s": cause_s, "rank": blamed_rank}
        return odd.model_copy(update=blame)

    slowest_rank = max(
        main_causes, key=lambda rank: ranks[rank].excess("wall_s", odd.step)
    )
    differences = _differing_counters(ranks[slowest_rank], odd.step, excess_s)
    return odd.model_copy(update={"beside": differences, "rank": slowest_rank})


def _usual_s(odd: OddStep) -> float:
    """Return the seconds of the usual step with which ``odd`` was compared."""
    return odd.step_s / odd.ratio if odd.ratio else odd.step_s


def _are_first_steps_slow(
    odd: Sequence[OddStep], rows: Sequence[StepRow], first_steps: Sequence[int]
) -> bool:
    """Return whether at least half of the steps in ``rows`` that begin an epoch are slow.

    If fewer are, as in a loop whose every step begins an epoch, the beginning of an epoch does not explain one of them.
    """
    timed_steps = {row.step for row in rows}
    timed_first_steps = timed_steps.intersection(first_steps)
    slow_steps = {step.step for step in odd if step.ratio > 1.0}
    slow_first_steps = timed_first_steps & slow_steps
    return 2 * len(slow_first_steps) >= len(timed_first_steps)


def _with_epoch_as_cause(odd: OddStep, new_workers: int) -> OddStep:
    """Return ``odd``, which no counter explains, with the beginning of an epoch as its cause.

    New workers share the memory of the training process, which copies each page that it writes afterwards, so that all
    phases of the step may be slow.
    """
    words = _FIRST_STEP
    if new_workers:
        words += f", which started {count_text(new_workers, 'worker')}"
    cause_s = max(odd.step_s - _usual_s(odd), 0.0)
    blame = {"cause": words, "cause_s": cause_s, "beside": None}
    return odd.model_copy(update=blame)


def _possible_causes(
    rank: _RankReadings, odd: OddStep, workers: int | None
) -> list[_Cause]:
    """Return all causes that may have delayed ``odd``, each with the seconds that it explains (possibly 0)."""
    step = odd.step
    counters = rank.counters[step]
    page_faults = count_text(round(counters.minor_faults or 0), "page fault")
    garbage = f"{GARBAGE} of generation {counters.gc_generation}"
    causes = [
        _Cause(garbage, rank.excess("gc_s", step)),
        _Cause(_compilation_words(counters.compiled), rank.excess("compile_s", step)),
        _Cause(NO_CPU, rank.excess_in_step("cpu_wait_s", step)),
        _Cause(page_faults, rank.excess_in_step("fault_s", step)),
        _Cause(_clock_words(counters), _seconds_by_clock(rank, odd)),
        _Cause(_CHECKPOINT, rank.excess("checkpoint_s", step)),
    ]
    data_s = rank.data_excess_s(step)
    if workers and counters.asleep_s is not None:
        # While the workers had no batch ready, the training thread slept.
        asleep_s = rank.excess_in_step("asleep_s", step)
        causes.append(_Cause(_EMPTY_QUEUE, min(data_s, asleep_s)))
        return causes
    # The other causes may have delayed the loader, so their time is subtracted.
    loader_s = data_s - sum(cause.seconds for cause in causes)
    loader = f"{_LOADER} (num_workers=0)" if workers == 0 else _LOADER
    causes.append(_Cause(loader, max(loader_s, 0.0)))
    return causes


def _compilation_words(compiled: str | None) -> str:
    """Return the words for a compilation; ``compiled`` is the function, with the reason if it was compiled again."""
    if not compiled:
        return f"{_COMPILATION} of a backward pass"
    has_reason = "): " in compiled
    if has_reason:
        return f"{_RECOMPILATION} of {compiled}"
    return f"{_COMPILATION} of {compiled}"


def _clock_words(counters: StepCounters) -> str:
    """Return the words for a slow clock of the GPU, with the reasons for which the GPU throttled it."""
    clock_mhz = (counters.sm_clock_hz or 0.0) * 1e-6
    words = f"the GPU's clock at {clock_mhz:,.0f} MHz"
    if counters.throttled:
        words += f" ({', '.join(counters.throttled)})"
    return words


def _seconds_by_clock(rank: _RankReadings, odd: OddStep) -> float:
    """Return how many seconds longer the usual step would take at this clock rate, if all of it depended on the clock.

    0 if a clock rate is unknown.
    """
    clock_hz = rank.counters[odd.step].sm_clock_hz
    usual_hz = rank.usual.sm_clock_hz
    if not clock_hz or not usual_hz:
        return 0.0
    return max(_usual_s(odd) * (usual_hz / clock_hz - 1.0), 0.0)


def _differing_counters(rank: _RankReadings, step: int, excess_s: float) -> str:
    """Return the counters that differ from the usual ones, as text: how many seconds more, and which counts.

    ``excess_s`` is by how much the step was longer than usual; much shorter times are not listed.
    """
    least_s = _LEAST_REPORTED_SHARE * excess_s
    differences = []
    for name, words in _SECONDS_WORDS.items():
        more_s = rank.excess_in_step(name, step)
        if more_s >= least_s:
            differences.append(f"{duration_text(more_s)} more {words}")
    if rank.excess("between_s", step) >= least_s:
        # Counts are left out, because what they count may have happened between the steps.
        return ", ".join(differences)

    # counters of events: those that are more than double the usual count
    for name, (singular, plural) in _COUNT_WORDS.items():
        excess = rank.excess(name, step)
        usual_count = getattr(rank.usual, name) or 0.0
        is_beyond_double = excess > usual_count
        if is_beyond_double and excess >= _FEWEST_EXTRA.get(name, 1):
            count = round(getattr(rank.counters[step], name))
            unit = singular if count == 1 else plural
            differences.append(f"{count:,} {unit}")
    return ", ".join(differences)
