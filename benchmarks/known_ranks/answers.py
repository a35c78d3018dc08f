"""What was said of a case, against what is true."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.known_ranks.notes import Notes
from benchmarks.known_ranks.trial import Case, Seen, blocks
from benchmarks.known_ranks.truth import step_s, truth_of
from lm_profiler.record.rank_facts import RankFinding, Ranks
from lm_profiler.record.run_record import RunRecord

SHARE, LEAST_S = 0.05, 2e-3
"""What a figure may be off: this share of it, or this many seconds."""


@dataclass(frozen=True)
class Answer:
    """Of one case: what was found, and the largest errors in seconds.

    ``own_off_s`` and ``waiting_off_s`` are the largest over ranks (and phases), those within ``SHARE`` as well;
    ``close`` whether each is within its tolerance. ``step_s`` is the mean step with the delays once the instruments
    have ended, ``saved_s`` how much shorter it really was without.
    """

    case: Case
    world: int
    finding: RankFinding | None
    notes: list[str]
    own_off_s: float
    waiting_off_s: float
    close: bool
    step_s: float
    saved_s: float

    @property
    def right(self) -> bool:
        """Whether the finding names what was slow, and nothing where nothing was."""
        found = self.finding
        if found is None:
            return False
        if self.case.told[0] == "equal":
            return found.kind == "equal"
        return (found.kind, found.rank, found.phase) == self.case.told

    @property
    def off_s(self) -> float | None:
        """The predicted saving less the real one."""
        if self.finding is None or self.finding.saves_s is None:
            return None
        return self.finding.saves_s - self.saved_s

    @property
    def foreseen(self) -> bool:
        """Whether the predicted saving is the real one but for 5 % of it."""
        return self.off_s is not None and abs(self.off_s) <= SHARE * abs(self.saved_s)

    @property
    def foreseen_of_step(self) -> bool:
        """But for 5 % of the step."""
        return self.off_s is not None and abs(self.off_s) <= SHARE * self.step_s


def answer(case: Case, seen: Sequence[Seen]) -> Answer:
    """``seen`` by each rank."""
    record, notes = seen[0].record, [each.notes for each in seen]
    ranks = None if record is None else record.ranks
    own, waiting = _errors(case, notes, ranks)
    delayed_s, mended_s = (
        step_s(notes, blocks(case, delayed), case.accumulate)
        for delayed in (True, False)
    )
    return Answer(
        case,
        len(seen),
        None if ranks is None else ranks.finding,
        _notes(record),
        max((abs(off) for off, _ in own), default=0.0),
        max((abs(off) for off, _ in waiting), default=0.0),
        bool(own)
        and all(
            abs(off) <= max(SHARE * truth, LEAST_S) for off, truth in [*own, *waiting]
        ),
        delayed_s,
        delayed_s - mended_s,
    )


def _notes(record: RunRecord | None) -> list[str]:
    """What the run says beside its figures, but for this machine's ceiling."""
    if record is None:
        return ["no record"]
    said = [note for note in record.notes if not note.startswith("ceiling")]
    return [
        *said,
        *(
            record.ranks.notes
            if record.ranks is not None
            else ["nothing is said of the ranks"]
        ),
    ]


Errors = list[tuple[float, float]]
"""What is off, and the truth."""


def _errors(
    case: Case, notes: Sequence[Notes], ranks: Ranks | None
) -> tuple[Errors, Errors]:
    """Of own work by phase, and of all waiting, in the steps that count in ``ranks``.

    The loop notes four phases; transfer, clipping and zeroing gradients are in its ``other``.
    """
    own: Errors = []
    waiting: Errors = []
    if ranks is None:
        return own, waiting
    # counted from 1
    truths = truth_of(notes, [step - 1 for step in ranks.columns], case.accumulate)
    for said, true in zip(ranks.by_rank, truths, strict=True):
        told_s = {phase: said.own_s.get(phase, 0.0) for phase in true.own_s}
        told_s["other"] = sum(said.own_s.values()) - sum(
            s for phase, s in told_s.items() if phase != "other"
        )
        own += [
            (told_s[phase] - seconds, seconds) for phase, seconds in true.own_s.items()
        ]
        waiting_s = sum(true.waiting_s.values())
        waiting.append((said.all_waiting_s - waiting_s, waiting_s))
    return own, waiting
