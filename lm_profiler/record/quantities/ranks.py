"""Several ranks: how their steps differ, whose own work is how long, who waits, for whom, and what mending it saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lm_profiler.record.parts import PARTS
from lm_profiler.record.quantities.quantity import Place, Quantity, at, computed, figure, figures_of
from lm_profiler.record.run import RunRecord


def _of_steps(what: Callable[[list[float]], float | None]) -> Callable[[RunRecord], float | None]:
    return lambda record: what(record.rank_step_s) if len(record.rank_step_s) > 1 else None


def _apart(steps: list[float]) -> float | None:
    return max(steps) / min(steps) - 1 if min(steps) > 0 else None


def _waiting(record: RunRecord) -> float | None:
    return None if record.ranks is None else record.ranks.waiting_share * record.ranks.step_s


def _working(record: RunRecord) -> float | None:
    return None if record.ranks is None else (1 - record.ranks.waiting_share) * record.ranks.step_s


def _hosts(record: RunRecord) -> int | None:
    return None if record.ranks is None else len(record.ranks.hosts)


def _saved(record: RunRecord) -> tuple[float, float] | None:
    finding = None if record.ranks is None else record.ranks.finding
    if finding is None or finding.low_s is None or finding.high_s is None:
        return None
    return finding.low_s, finding.high_s


_APART = "median step of the slowest rank over the fastest's, less 1"
_MEND = "by how much a step would be shorter if that took what the others take, with its 95 % interval"
_EXPOSED = "time of the collectives in {} that no compute hides"

_WAITING = computed("waiting_s", "waiting", "ms", "how long the mean rank waits for others in a step", _waiting)

RANKS: tuple[Quantity, ...] = (
    figure("environment.world_size", "ranks", "count", "processes of the run", "world_size"),
    computed("ranks_apart", "slowest rank longer by", "%", _APART, _of_steps(_apart)),
    computed("fastest_rank_s", "fastest rank's step", "ms", "shortest median step of a rank", _of_steps(min)),
    computed("slowest_rank_s", "slowest rank's step", "ms", "longest median step of a rank", _of_steps(max)),
    replace(_WAITING, place=Place.TABLE, run_tag="waiting_ms"),
    figure("ranks.waiting_share", "waiting share", "%", "share of the mean step in which the mean rank waits"),
    computed("own_work_s", "own work", "ms", "how long the mean rank works itself in a step", _working),
    *figures_of(
        "ranks.finding",
        ("kind", "who waits for whom", "text", "straggler, several, host, turns, equal or unsure", "waiting_for"),
        ("rank", "slow rank", "count", "the rank that the others wait for", "slow_rank"),
        ("host", "slow host", "text", "its host, or the host whose ranks the others wait for", "slow_host"),
        ("phase", "slow phase", "text", "the phase that takes longer there", "slow_phase"),
        ("excess_s", "longer by", "ms", "how much longer that takes than the others", "slow_by_s"),
        ("others_wait_s", "others wait", "ms", "how long the other ranks wait for it in the mean step"),
        ("last_in", "last in", "count", "steps in which the others waited for it longest", "slow_in_steps"),
        ("slow_ranks", "slow ranks", "count", "how many ranks the others wait for"),
        ("steps", "steps judged", "count", "measured steps that say who waits for whom", "ranks_judged_steps"),
        ("doubt", "why nobody is named", "text", "few steps, chance, or a shared machine", "ranks_doubt"),
    ),
    replace(figure("ranks.finding.saves_s", "mending it saves", "ms", _MEND, "mending_saves_s"), interval=_saved),
    *figures_of(
        "ranks.finding",
        ("low_s", "mending saves, low", "ms", "an end of that interval", "mending_saves_low_s"),
        ("high_s", "mending saves, high", "ms", "an end of that interval", "mending_saves_high_s"),
    ),
    computed("ranks_heard", "ranks heard", "count", "ranks of which waiting is known", at("ranks.heard")),
    *figures_of(
        "ranks",
        ("steps", "steps of waiting", "count", "measured steps of which waiting is known", "waiting_steps"),
        ("step_s", "step of waiting", "ms", "mean of those steps, over the ranks heard", "waiting_step_s"),
        ("witness", "waiting is known from", "text", "what says when each rank came", "waiting_witness"),
        ("exposed_source", "exposed is known from", "text", "what says which collectives compute does not hide"),
    ),
    computed("hosts", "hosts", "count", "machines that the ranks ran on", _hosts),
    *figures_of(
        "ranks.clocks",
        ("method", "clocks", "text", "how the ranks' clocks were brought together", "clocks_method"),
        ("uncertainty_s", "clocks differ by", "ms", "at most, as far as is known", "clocks_uncertainty_s"),
        ("drift", "drift of clocks", "ppm", "of the fastest clock against rank 0's", "clocks_drift"),
    ),
)
"""Of a run with several ranks, each once."""

_OF_PHASES = {"own": "own work", "waiting": "waiting"}
_OF_RANKS = (
    ("least_s", "least (ms)", "ms", "of the rank with least"),
    ("median_s", "median (ms)", "ms", "of the median rank"),
    ("largest_s", "most (ms)", "ms", "of the rank with most"),
    ("slowest", "rank", "count", "the rank with most"),
)


def _by_phase(part: str) -> tuple[Quantity, ...]:
    """Spreads over the ranks in ``part``, and what is exposed there."""
    spreads = (
        figure(
            f"ranks.{of}.{part}.{field}",
            f"{part}: {words}, {title}",
            unit,
            f"{words} in {part} in the mean step, {told}",
            f"{part}_{of}_{field}",
            of=part,
            place=Place.ASKED,
        )
        for of, words in _OF_PHASES.items()
        for field, title, unit, told in _OF_RANKS
    )
    exposed = _EXPOSED.format(part)
    told = figure(f"ranks.exposed_s.{part}", f"{part}: exposed (ms)", "ms", exposed, f"{part}_exposed_s", of=part)
    return *spreads, replace(told, place=Place.ASKED)


RANKS_BY_PHASE = tuple(of for part in PARTS for of in _by_phase(part))
"""Own work and waiting in each phase over the ranks, and exposed communication."""

_FOR_OTHERS = "for other ranks, in the mean step"

RANK_ROW = (
    figure("rank", "rank", "count", "of the whole group"),
    figure("host", "host", "text", "its machine"),
    *(figure(f"own_s.{part}", part, "ms", f"own work in {part} in the mean step") for part in PARTS),
    *(figure(f"waiting_s.{part}", f"waiting in {part}", "ms", _FOR_OTHERS, f"{part}_waiting") for part in PARTS),
)
"""A rank's mean step."""

SLOW_RANK_ROW = (
    figure("rank", "rank", "count", "that is slow"),
    figure("host", "host", "text", "its machine"),
    figure("phase", "phase", "text", "in which it is slow"),
    figure("excess_s", "longer by", "ms", "how much longer that takes than on the others, in the mean step"),
    figure("low_s", "longer by, low", "ms", "an end of its 95 % interval"),
    figure("high_s", "longer by, high", "ms", "an end of its 95 % interval"),
    figure("first_step", "from step", "count", "where it begins to be slow"),
    figure("last_step", "to step", "count", "where it ends to be slow"),
)
"""A rank that the others wait for, in one phase."""
