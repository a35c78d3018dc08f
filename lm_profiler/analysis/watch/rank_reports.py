"""Finds late and silent ranks of a run, from the statuses that the ranks write.

Instants are those at which rank 0 saw a report change, on its own clock: the ranks' clocks may differ.
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
_FEWEST_STEPS = 20  # of each rank between two comparisons
_LATE_SHARE = 0.05  # share of the step that a late rank must cost the others
_CHRONIC_TIMES = 3  # comparisons in a row after which a rank is always late
_REPEATED_TIMES = 120  # comparisons in a row after which a late rank is reported again


class _HeardReport(NamedTuple):
    """The last report of a rank that was a new one, and when rank 0 read it."""

    at_s: float
    status: WatchStatus


class _Lateness(NamedTuple):
    """The number of consecutive comparisons in which a rank was late in one phase, and the waiting of the others."""

    times: int
    cost_s: float


class _StepTimes(NamedTuple):
    """The mean steps of all ranks since the last comparison."""

    ranks: list[int]
    steps: list[int]  # of each rank
    per_step_s: NDArray[np.float64]  # (ranks, PARTS)


@dataclass(eq=False)
class RankReports:
    """Takes all ranks' statuses every now and then.

    A rank is late in a phase where it takes longer than the others' median, and they spend that time in a later forward
    or backward pass, where it spends less. A rank whose backward pass is slow looks like the others, which wait for
    it there, and is not reported.
    """

    # the ranks that do not report, and since when
    silent: dict[int, float] = field(default_factory=dict)
    waited_s: float = 0.0  # how long rank 0 waited for a late rank since the last reset
    _last_reports: dict[int, _HeardReport] = field(default_factory=dict)
    # the reports of the last comparison
    _compared: dict[int, WatchStatus] = field(default_factory=dict)
    # by rank and phase
    _lateness: dict[tuple[int, str], _Lateness] = field(default_factory=dict)

    def look(
        self,
        now_s: float,
        reports: Mapping[int, WatchStatus],
        run_is_over: bool = False,
    ) -> list[WatchEvent]:
        """Take what the ranks report at ``now_s`` of rank 0's clock; at the last look, few steps suffice."""
        silent_events = []
        for rank, report in reports.items():
            event = self._silence(now_s, rank, report)
            if event is not None:
                silent_events.append(event)
        heard_reports = {}
        for rank, report in reports.items():
            if rank not in self.silent:
                heard_reports[rank] = report
        fewest_steps = 1 if run_is_over else _FEWEST_STEPS
        late_events = self._compare(now_s, heard_reports, fewest_steps)
        if run_is_over:  # the last comparison books what rank 0 waited; over a few steps anybody may be late
            return silent_events
        return [*silent_events, *late_events]

    def _silence(
        self, now_s: float, rank: int, report: WatchStatus
    ) -> WatchEvent | None:
        """Return an event if ``report`` shows that ``rank`` has become silent."""
        last_report = self._last_reports.get(rank)
        if last_report is None or report.ended or _is_newer(report, last_report.status):
            self._last_reports[rank] = _HeardReport(now_s, report)
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

    def _compare(
        self, now_s: float, reports: Mapping[int, WatchStatus], fewest_steps: int
    ) -> list[WatchEvent]:
        """Return the ranks that were late since the last comparison, once all ranks have enough steps."""
        times = self._times_since_last_comparison(reports)
        if len(times.ranks) < 2 or min(times.steps) < fewest_steps:
            return []
        self._compared = dict(reports)
        lateness_before = self._lateness
        self._lateness = {}
        events = []
        for index, rank in enumerate(times.ranks):
            own_s = times.per_step_s[index]
            usual_s = np.median(np.delete(times.per_step_s, index, axis=0), axis=0)
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
        """Return the number of steps of each rank since it was last compared, and its seconds per step and part."""
        steps = []
        seconds = []
        for rank, report in reports.items():
            if rank not in self._compared:
                self._compared[rank] = report.model_copy(
                    update={"timed": 0, "seconds": {}}
                )
            previous = self._compared[rank]
            steps.append(report.timed - previous.timed)
            seconds.append(_part_seconds(report) - _part_seconds(previous))
        per_step_s = np.array(seconds).reshape(-1, len(PARTS)) / np.maximum(
            steps, 1
        ).reshape(-1, 1)
        return _StepTimes(list(reports), steps, per_step_s)

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
    return np.array([report.seconds.get(part, 0.0) for part in PARTS])


def _costs_s(
    own_s: NDArray[np.float64], others_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return by part what a rank's excess time costs the others per step: how long they wait for it afterwards."""
    waits_s = np.zeros(len(PARTS))
    for phase in WAITING_PHASES:
        index = PARTS.index(phase)
        waits_s[index] = max(others_s[index] - own_s[index], 0.0)
    waits_afterwards_s = np.full(len(PARTS), waits_s.sum())
    waits_afterwards_s[PARTS.index("forward")] = waits_s[PARTS.index("backward")]
    waits_afterwards_s[PARTS.index("backward")] = 0.0
    excess_s = np.maximum(own_s - others_s, 0.0)
    costs_s: NDArray[np.float64] = np.minimum(excess_s, waits_afterwards_s)
    return costs_s
