"""Finds late and silent ranks of a run, from the status reports that the ranks write.

The clocks of ranks may differ. So all times here are on the clock of rank 0: a report's time is when rank 0 first read
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm_profiler.record.parts import PARTS
from lm_profiler.record.watch_files import WAITING_PHASES, WatchEvent, WatchStatus

SILENT_S = 60.0
_FEWEST_STEPS = 20  # the steps that each rank must have made since the last comparison
# a rank is late if it costs the others at least this share of its step
_LATE_SHARE = 0.05
# numbers of successive comparisons in which a rank was late:
_CHRONIC_TIMES = 3  # from this on it counts as always late
_REPEATED_TIMES = 120  # after each so many it is reported again


class _NewReport(NamedTuple):
    """The last new report of a rank, and when rank 0 read it."""

    at_s: float
    status: WatchStatus


class _Lateness(NamedTuple):
    """A rank's lateness in one phase, over successive comparisons."""

    times: int  # the number of comparisons at which the rank was late
    cost_s: float  # how long the other ranks waited for the rank


class _StepTimes(NamedTuple):
    """The mean steps of all ranks since the last comparison."""

    ranks: list[int]
    steps: list[int]  # number of steps of each rank
    per_step_s: NDArray[np.float64]  # (ranks, PARTS) mean seconds per step


@dataclass(eq=False)
class RankReports:
    """Compares the status reports of all ranks from time to time.

    A rank is late in a phase if it takes longer there than the median of the others, and the others then wait for it in
    a later forward or backward pass, which takes them longer than it. A rank with a slow backward pass cannot be
    distinguished from the others, which wait for it in their backward pass, so it is not reported.
    """

    # when each silent rank made its last report, by rank
    silent: dict[int, float] = field(default_factory=dict)
    waited_s: float = 0.0  # how long rank 0 waited for late ranks; the caller resets it
    _last_reports: dict[int, _NewReport] = field(default_factory=dict)
    # the reports at the last comparison, by rank
    _compared: dict[int, WatchStatus] = field(default_factory=dict)
    # lateness by rank and phase; only of ranks that were late at the last comparison
    _lateness: dict[tuple[int, str], _Lateness] = field(default_factory=dict)

    def judge(
        self,
        now_s: float,
        reports: Mapping[int, WatchStatus],
        run_is_over: bool = False,
    ) -> list[WatchEvent]:
        """Return the events of silent and late ranks, from the ranks' reports as rank 0 reads them at ``now_s``."""
        silent_events = []
        for rank, report in reports.items():
            event = self._silence_event(now_s, rank, report)
            if event is not None:
                silent_events.append(event)
        reports_to_compare = {}
        for rank, report in reports.items():
            if rank not in self.silent:
                reports_to_compare[rank] = report
        fewest_steps = 1 if run_is_over else _FEWEST_STEPS
        late_events = self._late_rank_events(now_s, reports_to_compare, fewest_steps)
        if run_is_over:
            # The last comparison only adds to ``waited_s``: over a few steps any rank may be late.
            return silent_events
        return [*silent_events, *late_events]

    def _silence_event(
        self, now_s: float, rank: int, report: WatchStatus
    ) -> WatchEvent | None:
        """Return an event if ``report`` shows that ``rank`` has become silent."""
        last_report = self._last_reports.get(rank)
        if last_report is None or report.ended or _is_newer(report, last_report.status):
            self._last_reports[rank] = _NewReport(now_s, report)
            self.silent.pop(rank, None)
            return None
        quiet_s = now_s - last_report.at_s
        if quiet_s < SILENT_S or rank in self.silent:
            return None
        self.silent[rank] = last_report.at_s
        return WatchEvent(
            at_s=now_s,
            rank=rank,
            step=report.steps,
            kind="silent rank",
            part=report.phase or None,
            now=quiet_s,
        )

    def _late_rank_events(
        self, now_s: float, reports: Mapping[int, WatchStatus], fewest_steps: int
    ) -> list[WatchEvent]:
        """Return events of ranks that were late since the last comparison; none while ranks have too few steps."""
        times = self._times_since_last_comparison(reports)
        if len(times.ranks) < 2 or min(times.steps) < fewest_steps:
            return []
        self._compared = dict(reports)
        lateness_before = self._lateness
        self._lateness = {}
        events = []
        for index, rank in enumerate(times.ranks):
            # (PARTS,) seconds per step of this rank, the median of the others, and how long they wait for this rank
            own_s = times.per_step_s[index]
            other_ranks_s = np.delete(times.per_step_s, index, axis=0)
            usual_s = np.median(other_ranks_s, axis=0)
            costs_s = _costs_s(own_s, usual_s)
            part_index = int(costs_s.argmax())
            part = PARTS[part_index]
            if costs_s[part_index] < _LATE_SHARE * own_s.sum():
                continue

            previous = lateness_before.get((rank, part), _Lateness(times=0, cost_s=0.0))
            cost_s = previous.cost_s + float(costs_s[part_index]) * times.steps[index]
            lateness = _Lateness(times=previous.times + 1, cost_s=cost_s)
            self._lateness[rank, part] = lateness
            self._add_waiting(times, index, part_index)
            # the first time, once it counts as chronic, and then again from time to time
            is_worth_an_event = (
                lateness.times in (1, _CHRONIC_TIMES)
                or lateness.times % _REPEATED_TIMES == 0
            )
            if not is_worth_an_event:
                continue
            event = WatchEvent(
                at_s=now_s,
                kind="rank late",
                rank=rank,
                step=reports[rank].steps,
                part=part,
                now=float(own_s[part_index]),
                against=float(usual_s[part_index]),
                cost_s=cost_s,
                chronic=lateness.times >= _CHRONIC_TIMES,
            )
            events.append(event)
        return events

    def _times_since_last_comparison(
        self, reports: Mapping[int, WatchStatus]
    ) -> _StepTimes:
        """Return the number of steps of each rank, and its mean seconds per step, since the last comparison."""
        steps = []
        seconds = []
        for rank, report in reports.items():
            if rank not in self._compared:
                # a new rank is compared from its start on
                self._compared[rank] = report.model_copy(
                    update={"timed": 0, "seconds": {}}
                )
            previous = self._compared[rank]
            steps.append(report.timed - previous.timed)
            seconds.append(_part_seconds(report) - _part_seconds(previous))
        sums_s = np.array(seconds).reshape(-1, len(PARTS))  # (ranks, PARTS)
        counts = np.maximum(steps, 1).reshape(-1, 1)  # (ranks, 1)
        return _StepTimes(list(reports), steps, per_step_s=sums_s / counts)

    def _add_waiting(self, times: _StepTimes, late_index: int, part_index: int) -> None:
        """Add how long rank 0 waited for the late rank."""
        is_rank_0 = times.ranks[late_index] == 0
        if is_rank_0 or 0 not in times.ranks:
            return
        own_index = times.ranks.index(0)
        costs_s = _costs_s(times.per_step_s[late_index], times.per_step_s[own_index])
        self.waited_s += float(costs_s[part_index]) * times.steps[own_index]


def _is_newer(report: WatchStatus, previous: WatchStatus) -> bool:
    return report.written_s != previous.written_s or report.steps != previous.steps


def _part_seconds(report: WatchStatus) -> NDArray[np.float64]:
    """Return (PARTS,) the seconds of each part in all steps of ``report``."""
    return np.array([report.seconds.get(part, 0.0) for part in PARTS])


def _costs_s(
    own_s: NDArray[np.float64], others_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return (PARTS,) how long the other ranks wait per step because this rank takes longer in each part.

    The others wait in the forward and backward passes that follow the part, where they take longer than this rank. An
    excess costs them at most that wait.

    Args:
        own_s: (PARTS,) the seconds per step of this rank.
        others_s: (PARTS,) the usual seconds per step of the others.
    """
    waits_s = np.zeros(len(PARTS))
    for phase in WAITING_PHASES:
        index = PARTS.index(phase)
        waits_s[index] = max(others_s[index] - own_s[index], 0.0)
    # Forward is followed by backward only. After backward, nobody waits in the same step.
    waits_afterwards_s = np.full(len(PARTS), waits_s.sum())
    waits_afterwards_s[PARTS.index("forward")] = waits_s[PARTS.index("backward")]
    waits_afterwards_s[PARTS.index("backward")] = 0.0
    excess_s = np.maximum(own_s - others_s, 0.0)
    costs_s: NDArray[np.float64] = np.minimum(excess_s, waits_afterwards_s)
    return costs_s
