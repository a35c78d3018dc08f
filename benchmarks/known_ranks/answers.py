"""What was said of a case, against what is true."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.known_ranks.trial import Case, Seen
from lm_profiler.record.run import RunRecord
from lm_profiler.record.run.ranks import RankFinding, Ranks

SHARE, LEAST_S = 0.05, 2e-3
"""What a figure may be off: this share of it, or this many seconds."""


@dataclass(frozen=True)
class Answer:
    """Of one case: what was found, and the largest errors in seconds.

    ``own_off_s`` and ``waiting_off_s`` are the largest over ranks (and phases), those within ``SHARE`` as well;
    ``close`` whether each is within its tolerance. ``saved_s`` is how much shorter the mean step really was.
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


def answer(case: Case, seen: Sequence[tuple[Seen, Seen]]) -> Answer:
    """``seen`` by each rank with the delays, and mended."""
    delayed, mended = [each for each, _ in seen], [each for _, each in seen]
    record = delayed[0].record
    ranks = None if record is None else record.ranks
    own, waiting = _errors(delayed, mended, ranks)
    return Answer(
        case,
        len(seen),
        None if ranks is None else ranks.finding,
        []
        if record is None
        else [n for n in record.notes if not n.startswith("ceiling")] + (ranks.notes if ranks else []),
        max((abs(off) for off, _ in own), default=0.0),
        max((abs(off) for off, _ in waiting), default=0.0),
        bool(own) and all(abs(off) <= max(SHARE * truth, LEAST_S) for off, truth in [*own, *waiting]),
        delayed[0].step_s,
        delayed[0].step_s - mended[0].step_s,
    )


def _notes(record: RunRecord | None) -> list[str]:
    """What the run says beside its figures, but for this machine's ceiling."""
    if record is None:
        return ["no record"]
    said = [note for note in record.notes if not note.startswith("ceiling")]
    return [*said, *(record.ranks.notes if record.ranks is not None else ["nothing is said of the ranks"])]


Errors = list[tuple[float, float]]
"""What is off, and the truth."""


def _errors(delayed: Sequence[Seen], mended: Sequence[Seen], ranks: Ranks | None) -> tuple[Errors, Errors]:
    """Of own work by phase, and of all waiting.

    What a rank did not sleep is the loop's own, what collectives take when nobody is late, and waiting. Nobody is late
    for the rank that is held shortest in the mended run. How much of the loop's own is ``other`` is taken from what was
    said of the mended run, so of that phase the delay is the truth; sharded, where collectives are in every phase and
    nobody sees when they hold a rank, of every phase.
    """
    own: Errors = []
    waiting: Errors = []
    talking_s = min(each.held_s or 0.0 for each in mended)
    loop_s = min(each.unslept_s for each in mended) - talking_s
    for rank, truth in enumerate(delayed if ranks is not None else []):
        assert ranks is not None
        times = ranks.by_rank[rank]
        held_s = truth.unslept_s - loop_s if truth.held_s is None else truth.held_s
        more_s = _beside_sleep(mended, rank)
        if truth.held_s is not None:
            more_s = {"backward": talking_s, "other": more_s.get("other", 0.0)}
        for phase, slept_s in truth.slept_s.items():
            true_s = slept_s + more_s.get(phase, 0.0)
            own.append((times.own_s.get(phase, 0.0) - true_s, true_s))
        waiting_s = max(held_s - talking_s, 0.0)
        waiting.append((times.all_waiting_s - waiting_s, waiting_s))
    return own, waiting


def _beside_sleep(seen: Sequence[Seen], rank: int) -> dict[str, float]:
    """Own seconds of each phase, as they were said, that it did not sleep."""
    record, slept_s = seen[0].record, seen[rank].slept_s
    if record is None or record.ranks is None:
        return {}
    return {phase: record.ranks.by_rank[rank].own_s.get(phase, 0.0) - s for phase, s in slept_s.items()}
