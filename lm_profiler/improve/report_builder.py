"""Build the record of a search, which is written after each of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any

from lm_profiler.analysis.improve.trials import Candidate, Checked, Compared, Improvement, Ran
from lm_profiler.improve.candidates import Refused
from lm_profiler.improve.improve_request import ImproveRequest
from lm_profiler.record.improve import Ended, Final, ImproveRecord, Numerics, Tried

_SHARED = "{} of {} runs shared the machine with something else, which makes them differ: try again while it is quiet"


@dataclass(frozen=True)
class Account:
    """The parts of an improvement's record that do not change during the search."""

    request: ImproveRequest  # the options of the call
    started: str  # when the improvement first began
    look_s: float = 0.0  # seconds that the first setting's own run took
    refused: Sequence[Refused] = ()  # changes that are not tried
    notes: Sequence[str] = ()  # notes that hold whatever the search finds

    def record(self, search: Improvement, ended: Ended, runs: int, shared: int = 0) -> ImproveRecord:
        """Return the record as of now. ``shared`` counts the ``runs`` during which something else used the machine."""
        refused = [Tried(**_fields(each.candidate), verdict="REFUSED", why=each.why) for each in self.refused]
        return ImproveRecord(
            name=self.request.name,
            command=self.request.command,
            started=self.started,
            budget_s=self.request.budget_s,
            elapsed_s=self.look_s + search.spent_s,
            ended=ended,
            first_s=None if search.first is None else search.first.seconds,
            options=dict(search.options),
            tried=[*(_tried(of, of.candidate) for of in search.tried if of.candidate is not None), *refused],
            left=[candidate.name for candidate in search.left],
            final=None if search.last is None else _final(search.last),
            runs=runs,
            notes=[*self.notes, *([_SHARED.format(shared, runs)] if shared else [])],
        )


def _fields(candidate: Candidate) -> dict[str, Any]:
    return {**vars(candidate), "options": dict(candidate.options)}


def _tried(compared: Compared, candidate: Candidate) -> Tried:
    saved, low, high = compared.saved_s or (None, None, None)
    return Tried(
        **_fields(candidate),
        pairs=compared.pairs,
        a_s=compared.a_s,
        b_s=compared.b_s,
        saved_s=saved,
        low_s=low,
        high_s=high,
        a_bytes=_bytes(compared.a),
        b_bytes=_bytes(compared.b),
        numerics=None if compared.checked is None else _numerics(compared.checked),
        verdict=compared.verdict,
        accepted=compared.accepted,
        why=compared.why,
    )


def _numerics(checked: Checked) -> Numerics:
    loss = checked.loss if checked.loss is not None and isfinite(checked.loss) else None
    return Numerics(loss=loss, gradients=checked.gradients, within=checked.within)


def _final(last: Compared) -> Final | None:
    """Return the comparison of the first and the final setting; None where too few of its runs ended well."""
    if (interval := last.interval) is None or last.a_s is None or last.b_s is None:
        return None
    return Final(
        pairs=last.pairs,
        first_s=last.a_s,
        final_s=last.b_s,
        ratio=1.0 / interval.ratio,
        low=1.0 / interval.high,
        high=1.0 / interval.low,
        first_bytes=_bytes(last.a),
        final_bytes=_bytes(last.b),
    )


def _bytes(runs: Sequence[Ran]) -> int | None:
    """Return the median of the runs' peak bytes; None where none is known."""
    known = [run.memory_bytes for run in runs if run.memory_bytes is not None]
    return round(median(known)) if known else None
