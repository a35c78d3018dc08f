"""Several ranks in the table and the lines at a run's end: each phase's own work, waiting, and who waits for whom."""

from __future__ import annotations

from statistics import median

from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run import Floor, Ranks, RankSpread, RunRecord
from lm_profiler.report.run.milliseconds import ms_text
from lm_profiler.report.run.phases import table_of
from lm_profiler.report.tables.table import Table

WAITING = "waiting"
_SEEN = 0.001
"""Of the mean step: less of a phase is in no line."""


def own_work_table(record: RunRecord) -> Table:
    """A row for each phase's own work, one for waiting, one for the step; of the median rank and both extremes."""
    ranks = record.ranks
    assert ranks is not None
    titles = ("phase", "own work (ms)", "share", "least (ms)", "most (ms)", "on rank")
    spreads = {part: spread for part in PARTS if (spread := ranks.own.get(part)) is not None and spread.largest_s}
    if (waiting := waiting_of(ranks)) is not None:
        spreads[WAITING] = waiting
    rows = [(part, _texts(part, spread, ranks.step_s)) for part, spread in spreads.items()]
    step = ["step", ms_text(ranks.step_s), *[""] * (len(titles) - 2)]
    floors = {part: _of_own(floor, spreads[part].median_s) for part, floor in record.floors.items() if part in spreads}
    return table_of(titles, [*rows, ("step", step)], floors)


def _texts(title: str, spread: RankSpread, step_s: float) -> list[str]:
    """The rank with most is named where one has more than another."""
    middle, least, most = map(ms_text, (spread.median_s, spread.least_s, spread.largest_s))
    share = f"{spread.median_s / step_s:.1%}" if step_s else ""
    return [title, middle, share, least, most, "" if least == most else str(spread.slowest)]


def _of_own(floor: Floor, own_s: float) -> Floor:
    """Against own work: nobody waits faster."""
    return floor.model_copy(update={"times": own_s / floor.seconds if floor.seconds else None})


def waiting_of(ranks: Ranks) -> RankSpread | None:
    """Waiting in all phases together, over the ranks that the record has."""
    seconds = {of.rank: of.all_waiting_s for of in ranks.by_rank}
    if not seconds:
        return None
    middle = median(seconds.values()) if len(seconds) == ranks.heard else ranks.waiting_share * ranks.step_s
    most = max(seconds, key=lambda rank: seconds[rank])
    return RankSpread(least_s=min(seconds.values()), median_s=middle, largest_s=seconds[most], slowest=most)


def ranks_lines(record: RunRecord) -> list[str]:
    """Who waits for whom and what mending it would save, unless the verdict says so; then what else is known."""
    if record.ranks is None:
        return []
    said = who_waits(record.ranks)
    told = record.verdict is not None and said in record.verdict.evidence
    return [*[f"ranks: {said}"] * (not told), *communication_lines(record.ranks)]


def communication_lines(ranks: Ranks) -> list[str]:
    """What no compute hides, and what one must know of all this."""
    exposed = {part: seconds for part, seconds in ranks.exposed_s.items() if seconds >= _SEEN * ranks.step_s}
    lines = []
    if exposed:
        told = ", ".join(f"{part} {ms_text(seconds)}" for part, seconds in exposed.items())
        source = f" ({ranks.exposed_source})" if ranks.exposed_source else ""
        lines.append(f"exposed communication: {told} ms a step{source}")
    return [*lines, *(f"note: {note}" for note in ranks.notes)]


def who_waits(ranks: Ranks) -> str:
    """For whom the others wait, as the run's own analysis says it."""
    waits = f"the mean rank waits {ms_text(ranks.waiting_share * ranks.step_s)} of {ms_text(ranks.step_s)} ms a step"
    return ranks.finding.evidence or waits
