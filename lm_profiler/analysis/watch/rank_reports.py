"""Finds late and silent ranks of a run, from the statuses that the ranks write.

Instants are those at which rank 0 saw a report change, on its own clock: the ranks' clocks may differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lm_profiler.record.parts import PARTS
from lm_profiler.record.watch_files import WAITING_PHASES, WatchEvent, WatchStatus

SILENT_S = 60.0
_FEWEST = 20  # steps of each rank between two comparisons
_LATE = 0.05  # share of the step that a late rank must cost the others
_CHRONIC, _AGAIN = 3, 120  # comparisons in a row in which a rank is late; and until that is reported again


@dataclass(eq=False)
class RankReports:
    """Takes all ranks' statuses every now and then.

    A rank is late in a phase where it takes longer than the others' median, and they spend that time in a later forward
    or backward pass, where it spends less. A rank whose backward pass is slow looks like the others, which wait for
    it there, and is not reported.
    """

    silent: dict[int, float] = field(default_factory=dict)  # the ranks that do not report, and since when
    waited_s: float = 0.0  # how long rank 0 waited for a late rank since the last reset
    _heard: dict[int, tuple[float, WatchStatus]] = field(default_factory=dict)
    _before: dict[int, WatchStatus] = field(default_factory=dict)
    _late: dict[tuple[int, str], tuple[int, float]] = field(default_factory=dict)

    def look(self, now_s: float, reports: Mapping[int, WatchStatus], last: bool = False) -> list[WatchEvent]:
        """Take what the ranks report at ``now_s`` of rank 0's clock; at the ``last`` look, few steps suffice."""
        events = []
        for rank, report in reports.items():
            heard_s, before = self._heard.get(rank, (now_s, None))
            if before is None or (before.written_s, before.steps) != (report.written_s, report.steps) or report.ended:
                self._heard[rank] = now_s, report
                self.silent.pop(rank, None)
            elif now_s - heard_s >= SILENT_S and rank not in self.silent:
                self.silent[rank] = heard_s
                part, quiet_s = report.phase or None, now_s - heard_s
                silent = {"rank": rank, "step": report.steps, "kind": "silent rank", "part": part, "now": quiet_s}
                events.append(WatchEvent.model_validate({"at_s": now_s, **silent}))
        late = self._compare(now_s, {rank: of for rank, of in reports.items() if rank not in self.silent}, last)
        return events if last else events + late

    def _compare(self, now_s: float, reports: Mapping[int, WatchStatus], last: bool) -> list[WatchEvent]:
        """Return who has been late in the steps since the last comparison, once all ranks have enough of them."""
        for rank, report in reports.items():
            self._before.setdefault(rank, report.model_copy(update={"timed": 0, "seconds": {}}))
        steps = [of.timed - self._before[rank].timed for rank, of in reports.items()]
        if len(reports) < 2 or min(steps) < (1 if last else _FEWEST):
            return []
        ranks, since = list(reports), [_seconds(reports[rank]) - _seconds(self._before[rank]) for rank in reports]
        per_step = np.array(since) / np.array(steps)[:, None]
        self._before = dict(reports)
        before, self._late = self._late, {}
        events = []
        for at, rank in enumerate(ranks):
            usual = np.median(np.delete(per_step, at, axis=0), axis=0)
            costs = _costs(per_step[at], usual)
            part = int(costs.argmax())
            if costs[part] < _LATE * per_step[at].sum():
                continue
            times, cost_s = before.get((rank, PARTS[part]), (0, 0.0))
            times, cost_s = times + 1, cost_s + float(costs[part]) * steps[at]
            self._late[rank, PARTS[part]] = times, cost_s
            if 0 in reports and rank:
                mine = ranks.index(0)
                self.waited_s += float(_costs(per_step[at], per_step[mine])[part]) * steps[mine]
            if times in (1, _CHRONIC) or times % _AGAIN == 0:
                where = {"rank": rank, "step": reports[rank].steps, "part": PARTS[part], "chronic": times >= _CHRONIC}
                took = {"now": float(per_step[at, part]), "against": float(usual[part]), "cost_s": cost_s}
                events.append(WatchEvent.model_validate({"at_s": now_s, "kind": "rank late", **where, **took}))
        return events


def _seconds(report: WatchStatus) -> NDArray[np.float64]:
    return np.array([report.seconds.get(part, 0.0) for part in PARTS])


def _costs(own: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return by part what a rank's excess time costs the others per step: how long they wait for it afterwards."""
    waits = np.zeros(len(PARTS))
    for at in (PARTS.index(part) for part in WAITING_PHASES):
        waits[at] = max(others[at] - own[at], 0.0)
    after = np.full(len(PARTS), waits.sum())
    after[PARTS.index("forward")] = waits[PARTS.index("backward")]
    after[PARTS.index("backward")] = 0.0
    costs: NDArray[np.float64] = np.minimum(np.maximum(own - others, 0.0), after)
    return costs
