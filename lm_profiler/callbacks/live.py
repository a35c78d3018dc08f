"""Computes figures of a watched run while it runs, for the user's loggers and for monitoring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lm_profiler.measure.clocks.tape import TimedSteps
from lm_profiler.record.parts import TIMED
from lm_profiler.record.quantities import MFU, TIMES
from lm_profiler.record.run_record import RunRecord
from lm_profiler.record.steps import StepRow

PREFIX = "lm_profiler/"  # the prefix of the names in a logger
_LONGEST_ROW_NS = 10_000_000_000  # a row covers at most this time
# columns of ``TimedSteps.seconds``
_DATA = TIMED.index("data")
_STEP = TIMED.index("step")


class CountedBatches(NamedTuple):
    """Counts of the batches of some ``steps``, added up; None means unknown."""

    steps: int
    tokens: int | None
    samples: int | None
    useful_tokens: int | None = None


@dataclass(frozen=True)
class StageFigures:
    """Figures that the stages of a run measured, from which the MFU of watched steps follows. None means unknown."""

    # model FLOPs utilization times seconds of the step: the MFU that the step would have if it took one second
    mfu_seconds: float | None = None
    tokens_per_step: float | None = None  # tokens per step on this rank

    @classmethod
    def from_stages(
        cls, rows: Sequence[StepRow], record: RunRecord | None
    ) -> StageFigures:
        """Return the figures of stages with these ``rows`` and, on rank 0, this ``record``."""
        tokens = [
            row.tokens
            for row in rows
            if row.stage == "measure" and row.tokens is not None
        ]
        tokens_per_step: float | None = None
        if tokens:
            tokens_per_step = sum(tokens) / len(tokens)
        mfu_seconds: float | None = None
        if record is not None:
            mfu = MFU.get(record)
            step_s = TIMES["step"].get(record)
            if mfu and step_s:
                mfu_seconds = mfu * step_s
        return cls(mfu_seconds, tokens_per_step)

    def mfu(self, step_s: float, tokens_per_step: float | None) -> float | None:
        """Return the MFU of a step that takes ``step_s``; its FLOPs are assumed to be in proportion to its tokens.

        The MFU is inversely proportional to the seconds of a step, so ``mfu_seconds`` has their product.
        """
        if self.mfu_seconds is None:
            return None
        relative_work = 1.0
        if self.tokens_per_step and tokens_per_step is not None:
            relative_work = tokens_per_step / self.tokens_per_step
        return self.mfu_seconds * relative_work / step_s


@dataclass(eq=False)
class LiveSums:
    """Sums over some watched steps of this rank."""

    steps: int = 0
    step_s: float = 0.0
    data_s: float = 0.0
    held_bytes: int | None = None  # bytes held after the last step
    peak_bytes: int | None = None
    _batches: list[CountedBatches] = field(default_factory=list)

    def add_steps(self, timed: TimedSteps) -> None:
        """Add the steps whose times are known."""
        is_known = ~np.isnan(timed.seconds[:, _STEP])
        known_seconds = timed.seconds[is_known]
        step_s = known_seconds[:, _STEP]
        data_s = known_seconds[:, _DATA]
        self.steps += len(known_seconds)
        self.step_s += float(step_s.sum())
        self.data_s += float(data_s.sum())

    def add_batches(self, counted: CountedBatches | None) -> None:
        if counted is not None and counted.steps > 0:
            self._batches.append(counted)

    def add_memory(self, held_bytes: int | None, peak_bytes: int | None) -> None:
        self.held_bytes = held_bytes
        if peak_bytes is not None:
            self.peak_bytes = max(peak_bytes, self.peak_bytes or 0)

    def per_step(self, count_name: str) -> float | None:
        """Return the mean per step of the field ``count_name`` of ``CountedBatches``; None if one is unknown."""
        steps = 0
        total = 0
        for counted in self._batches:
            count = getattr(counted, count_name)
            if count is None:
                return None
            steps += counted.steps
            total += count
        if steps == 0:
            return None
        return total / steps


def live_figures(
    sums: LiveSums, stages: StageFigures, ranks: int = 1
) -> dict[str, float]:
    """Return the known figures of ``sums`` by name; empty without a step.

    Throughput is of all ``ranks``; each rank is assumed to process as much per step as this one.
    """
    if sums.steps == 0 or sums.step_s <= 0.0:
        return {}
    step_s = sums.step_s / sums.steps
    tokens_per_step = sums.per_step("tokens")
    figures: dict[str, float | None] = {
        "tokens_per_second": _rate(tokens_per_step, step_s, ranks),
        "useful_tokens_per_second": _rate(
            sums.per_step("useful_tokens"), step_s, ranks
        ),
        "samples_per_second": _rate(sums.per_step("samples"), step_s, ranks),
        "mfu": stages.mfu(step_s, tokens_per_step),
        "step_seconds": step_s,
        "data_share": sums.data_s / sums.step_s,
        "memory_bytes": sums.held_bytes,
        "peak_memory_bytes": sums.peak_bytes,
    }
    return {name: float(value) for name, value in figures.items() if value is not None}


def _rate(count_per_step: float | None, step_s: float, ranks: int) -> float | None:
    if count_per_step is None:
        return None
    return ranks * count_per_step / step_s


@dataclass(eq=False)
class LiveRows:
    """Adds up watched steps in rows for loggers. A row ends after ``every_steps`` steps, or after ten seconds."""

    stages: StageFigures
    ranks: int = 1
    every_steps: int = 50  # the Trainer's log_every_n_steps; 0 if only the time decides
    began_ns: int = 0  # when the current row began
    sums: LiveSums = field(default_factory=LiveSums)

    def is_due(self, now_ns: int) -> bool:
        has_steps = 0 < self.every_steps <= self.sums.steps
        return has_steps or now_ns - self.began_ns >= _LONGEST_ROW_NS

    def end_row(self, now_ns: int) -> dict[str, float]:
        """Return the figures of the row, by their names in loggers, and begin the next row; empty without a step."""
        figures = live_figures(self.sums, self.stages, self.ranks)
        self.sums = LiveSums()
        self.began_ns = now_ns
        return {f"{PREFIX}{name}": value for name, value in figures.items()}
