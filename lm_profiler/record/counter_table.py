"""A table of the counters of many steps, as arrays: a watched run reads up to 200 steps per second."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm_profiler.record.run_record import StepCounters

# the fields of ``StepCounters`` that are not numbers which can be averaged
_LABELS = ("gc_generation", "compiled", "throttled")
FIGURES = tuple(
    name for name in StepCounters.model_fields if name not in ("step", "rank", *_LABELS)
)

Figures = NDArray[np.float64]


@dataclass(frozen=True)
class CounterTable:
    """The counters of n steps of one rank, in order."""

    rank: int = 0
    steps: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    # (n, FIGURES), NaN if unknown
    figures: Figures = field(default_factory=lambda: np.empty((0, len(FIGURES))))
    # by step, the labels that are not None, by the name of their field; most steps have none
    labels: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    @staticmethod
    def from_counters(counters: Sequence[StepCounters]) -> CounterTable:
        """Return the table of ``counters``, which are of one rank."""
        if not counters:
            return CounterTable()
        rows = []
        labels = {}
        for counter in counters:
            values = [getattr(counter, name) for name in FIGURES]
            rows.append([np.nan if value is None else value for value in values])
            known_labels = {}
            for name in _LABELS:
                label = getattr(counter, name)
                if label is not None:
                    known_labels[name] = label
            if known_labels:
                labels[counter.step or 0] = known_labels
        return CounterTable(
            rank=counters[0].rank,
            steps=np.array([counter.step or 0 for counter in counters], np.int64),
            figures=np.array(rows, dtype=float),
            labels=labels,
        )

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[StepCounters]:
        for index in range(len(self)):
            yield self.row(index)

    def part(self, begin: int, end: int) -> CounterTable:
        """Return the rows from ``begin`` to before ``end``."""
        return CounterTable(
            self.rank, self.steps[begin:end], self.figures[begin:end], self.labels
        )

    def last(self, most_rows: int) -> CounterTable:
        return self.part(max(len(self) - most_rows, 0), len(self))

    def between(self, first_step: int, last_step: int) -> CounterTable:
        """Return the rows of the steps from ``first_step`` to ``last_step``."""
        begin = int(np.searchsorted(self.steps, first_step))
        end = int(np.searchsorted(self.steps, last_step, "right"))
        return self.part(begin, end)

    def followed_by(self, later: CounterTable, most_rows: int) -> CounterTable:
        """Return the last ``most_rows`` rows of this table and the ``later`` one."""
        steps = np.concatenate([self.steps, later.steps])[-most_rows:]
        figures = np.concatenate([self.figures, later.figures])[-most_rows:]
        labels = {**self.labels, **later.labels}
        if len(labels) > most_rows:
            labels = {step: labels[step] for step in steps.tolist() if step in labels}
        return CounterTable(later.rank, steps, figures, labels)

    def row(self, index: int) -> StepCounters:
        """Return the counters of the step at ``index``."""
        step = int(self.steps[index])
        known_labels = self.labels.get(step, {})
        return counters_of(self.figures[index], self.rank, step=step, **known_labels)

    def row_of(self, step: int) -> StepCounters | None:
        """Return the counters of ``step``; None if they were not read."""
        index = int(np.searchsorted(self.steps, step))
        is_known = index < len(self) and self.steps[index] == step
        return self.row(index) if is_known else None

    def total(self, name: str) -> float:
        """Return the sum of the figure ``name`` over the steps that have it."""
        return float(np.nansum(self.figures[:, FIGURES.index(name)]))

    def label_of_largest(self, label_name: str, figure_name: str) -> Any:
        """Return the label of the step with the largest figure ``figure_name``; None if it has none."""
        column = np.nan_to_num(self.figures[:, FIGURES.index(figure_name)])
        step = int(self.steps[int(column.argmax())])
        return self.labels.get(step, {}).get(label_name)

    def mean(self) -> Figures:
        """Return (FIGURES,) the mean of each figure over the steps that have it; NaN if none has it."""
        known = ~np.isnan(self.figures)
        sums = np.nansum(self.figures, axis=0)
        counts = known.sum(axis=0)
        mean: Figures = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
        return mean

    def median(self) -> Figures:
        """Return (FIGURES,) the median of each figure over the steps that have it; NaN if none has it."""
        in_order = np.sort(self.figures, axis=0)  # unknown figures come last
        counts = (~np.isnan(self.figures)).sum(axis=0)
        columns = np.arange(len(FIGURES))
        lower = in_order[np.maximum(counts - 1, 0) // 2, columns]
        upper = in_order[counts // 2, columns]
        median: Figures = (lower + upper) / 2.0
        return median


NO_COUNTERS = CounterTable()


def counters_of(figures: Figures, rank: int = 0, **labels: Any) -> StepCounters:
    """Return (FIGURES,) ``figures`` and ``labels``, which may include the step, as ``StepCounters``."""
    known = {}
    for name, value in zip(FIGURES, figures.tolist(), strict=True):
        if value == value:  # not NaN
            known[name] = value
    return StepCounters(rank=rank, **known, **labels)
