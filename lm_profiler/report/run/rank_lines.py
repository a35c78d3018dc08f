"""The table and the lines about several ranks: own work by phase, waiting, and which rank waits for which."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, median

from lm_profiler.record.figure import ms_text
from lm_profiler.record.parts import BETWEEN_STEPS
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run_record import (
    CodePart,
    Floor,
    Ranks,
    RankSpread,
    RunRecord,
    SlowRank,
)
from lm_profiler.record.text import ranks_text
from lm_profiler.report.run.sections import code_parts_in, table_with_floors
from lm_profiler.report.tables.table import Table

WAITING = "waiting"
_TITLES = ("phase", "own work (ms)", "share", "least (ms)", "most (ms)", "on rank")
_MOST_RANKS_NAMED = 16  # ranks that a line names one by one
_LEAST_EXPOSED = 0.001  # the share of the mean step from which a phase's exposed communication is shown


# -- the table ---------------------------------------------------------------------------------------------------------


def own_work_table(record: RunRecord) -> Table:
    """Return rows for each phase's own work, for waiting and for the step: the median rank and both extremes.

    Below a phase are the parts that the program marks in it. Their times are those of rank 0, and include waiting.
    """
    ranks = record.ranks
    assert ranks is not None
    spreads = _spreads_over_ranks(ranks)
    rows = []
    for part, spread in spreads.items():
        rows.append((part, _row_texts(part, spread, ranks.step_s)))
        for code_part in code_parts_in(record, part):
            part_texts = _code_part_texts(code_part, ranks.step_s)
            rows.append((f"part {code_part.name}", part_texts))
    empty_cells = [""] * (len(_TITLES) - 2)
    rows.append(("step", ["step", ms_text(ranks.step_s), *empty_cells]))
    floors = {} if record.contended else _own_work_floors(record.floors, spreads)
    return table_with_floors(_TITLES, rows, floors)


def _spreads_over_ranks(ranks: Ranks) -> dict[str, RankSpread]:
    """Return how far the ranks differ in each phase that has own work, and in waiting."""
    spreads = {}
    for part in PARTS:
        spread = ranks.own.get(part)
        if spread is not None and spread.largest_s:
            spreads[part] = spread
    waiting = waiting_spread(ranks)
    if waiting is not None:
        spreads[WAITING] = waiting
    return spreads


def _own_work_floors(
    floors: Mapping[str, Floor], spreads: Mapping[str, RankSpread]
) -> dict[str, Floor]:
    """Return the floors with their ratios to own work: waiting is left out, because a floor is about work."""
    compared = {}
    for part, floor in floors.items():
        if part not in spreads:
            continue
        times = None
        if floor.seconds:
            times = spreads[part].median_s / floor.seconds
        compared[part] = floor.model_copy(update={"times": times})
    return compared


def _row_texts(title: str, spread: RankSpread, step_s: float) -> list[str]:
    """Return the texts of a row; if ranks differ, the slowest rank is named."""
    shortest = ms_text(spread.least_s)
    longest = ms_text(spread.largest_s)
    share = ""
    if step_s:
        share = f"{spread.median_s / step_s:.1%}"
    rank = "" if shortest == longest else str(spread.slowest)
    return [title, ms_text(spread.median_s), share, shortest, longest, rank]


def _code_part_texts(code_part: CodePart, step_s: float) -> list[str]:
    """Return the texts of a marked part's row. Only rank 0's time of it is known, so the row has no extremes."""
    share = ""
    if step_s:
        share = f"{code_part.seconds / step_s:.1%}"
    title = f"  {code_part.name}, on rank 0"
    return [title, ms_text(code_part.seconds), share, "", "", ""]


def waiting_spread(ranks: Ranks) -> RankSpread | None:
    """Return the spread over the ranks of waiting in all phases; None without ranks."""
    waiting_s = {row.rank: row.all_waiting_s for row in ranks.by_rank}
    if not waiting_s:
        return None
    # With many ranks the record has only the extreme ones, whose median is not that of all ranks: use the mean of all.
    middle_s = ranks.waiting_share * ranks.step_s
    if len(waiting_s) == ranks.heard:
        middle_s = median(waiting_s.values())
    slowest = max(waiting_s, key=lambda rank: waiting_s[rank])
    least_s = min(waiting_s.values())
    return RankSpread(
        least_s=least_s,
        median_s=middle_s,
        largest_s=waiting_s[slowest],
        slowest=slowest,
    )


# -- the lines ---------------------------------------------------------------------------------------------------------


def ranks_lines(record: RunRecord) -> list[str]:
    """Return the line on which rank waits for which, and the lines on communication."""
    if record.ranks is None:
        return []
    return [f"ranks: {who_waits(record.ranks)}", *communication_lines(record.ranks)]


def communication_lines(ranks: Ranks) -> list[str]:
    """Return lines on communication, and the notes on the ranks."""
    lines = []
    least_s = _LEAST_EXPOSED * ranks.step_s
    exposed_phases = []
    for part, seconds in ranks.exposed_s.items():
        if seconds >= least_s:
            exposed_phases.append(f"{part} {ms_text(seconds)}")
    if exposed_phases:
        source = ranks.exposed_source or "of an unknown source"
        phases = ", ".join(exposed_phases)
        lines.append(f"exposed communication: {phases} ms per step ({source})")
    exposed_s = ranks.exposed_communication_s
    if ranks.communication_s and exposed_s is not None:
        took = f"collectives: {ms_text(ranks.communication_s)} ms of a traced step"
        share = exposed_s / ranks.communication_s
        lines.append(
            f"{took}, including waiting; {ms_text(exposed_s)} ms ({share:.0%}) are not hidden by computation"
        )
    lines += [f"note: {note}" for note in ranks.notes]
    return lines


def who_waits(ranks: Ranks) -> str:
    """Return which ranks the others wait for, how sure that is, and what fixing it would save."""
    finding = ranks.finding
    waiting_ms = ms_text(ranks.waiting_share * ranks.step_s)
    step_ms = ms_text(ranks.step_s)
    waits = f"on average a rank waits {waiting_ms} of {step_ms} ms per step"
    if finding.kind == "equal":
        return f"no rank is slower than the others; {waits}"
    if finding.kind == "unsure":
        return f"{_doubtful_text(ranks)}; {waits}"
    if finding.saves_s is None:  # a kind that a later version has added
        return waits
    if finding.kind == "turns":
        saved = f"if all ranks were as fast as the median rank, a step would be {_ms(finding.saves_s)} shorter"
        return f"in each step a different rank is slow {_in_phase(finding.phase)}; {waits}; {saved}"
    return "; ".join(_slow_rank_texts(ranks, finding.saves_s))


def _slow_rank_texts(ranks: Ranks, saves_s: float) -> list[str]:
    """Return phrases on which ranks are slow, why, how long the others wait, and what fixing it would save."""
    finding = ranks.finding
    is_single = finding.kind == "straggler"
    subject = "it" if is_single else "they"
    pronoun = "it" if is_single else "them"
    texts = [_slow_ranks_text(ranks)]
    if finding.cause is not None:
        spends = "it spends that time" if is_single else "they spend it"
        texts.append(f"{spends} {finding.cause}")
    has_fast_ranks = (finding.slow_ranks or 1) < ranks.heard
    if finding.others_wait_s is not None and has_fast_ranks:
        wait = _ms(finding.others_wait_s)
        texts.append(f"the others wait {wait} per step for {pronoun}")
    interval = ""
    if finding.low_s is not None and finding.high_s is not None:
        interval = f" [{finding.low_s * 1e3:.1f}, {finding.high_s * 1e3:.1f}]"
    texts.append(f"fixing {pronoun} would save {_ms(saves_s)} per step{interval}")
    if finding.last_in is not None:
        steps = finding.steps or ranks.steps
        texts.append(
            f"{subject} caused the most waiting in {finding.last_in} of {steps} steps"
        )
    return texts


_DOUBT_TEXTS = {
    "shared machine": "but other programs on this machine may have caused this",
    "chance": "but this may be chance",
}


def _doubtful_text(ranks: Ranks) -> str:
    """Return which rank may be slow, and why this is uncertain."""
    finding = ranks.finding
    few_steps = f"but {finding.steps} steps are too few to be sure"
    doubt = _DOUBT_TEXTS.get(finding.doubt or "", few_steps)
    if finding.slow:
        return f"{_slow_ranks_text(ranks)}, {doubt}"
    if finding.phase is None:
        return f"which rank waits for which is unknown: {doubt}"
    rank = "another rank" if finding.rank is None else f"rank {finding.rank}"
    return f"{rank} is slow {_in_phase(finding.phase)} in some steps, {doubt}"


def _slow_ranks_text(ranks: Ranks) -> str:
    """Return ``rank 1 is 30.0 ms slower in data``; ranks that are slow in the same phase and steps share a phrase."""
    finding = ranks.finding
    if not finding.slow:
        return _slow_rank_of_0_2(ranks)
    by_place: defaultdict[str, list[SlowRank]] = defaultdict(list)
    for slow_rank in finding.slow:
        by_place[_place_text(slow_rank, finding.steps or 0)].append(slow_rank)
    phrases = []
    for place, slow_ranks in by_place.items():
        excess_s = fmean(slow_rank.excess_s for slow_rank in slow_ranks)
        phrases.append(
            f"{_ranks_with_verb(slow_ranks, ranks)} {_ms(excess_s)} slower {place}"
        )
    return "; ".join(phrases)


def _slow_rank_of_0_2(ranks: Ranks) -> str:
    """Return the phrase on the slow rank in a record of version 0.2, which names one rank or one host."""
    finding = ranks.finding
    subject = f"host {finding.host}" if finding.rank is None else f"rank {finding.rank}"
    text = f"{subject}: {_ms(finding.excess_s or 0.0)} slower"
    if finding.phase:
        text += f" {_in_phase(finding.phase)}"
    return text


def _in_phase(phase: str | None) -> str:
    if phase == BETWEEN_STEPS:
        return phase
    return f"in {phase}"


def _place_text(slow_rank: SlowRank, steps: int) -> str:
    """Return the phase in which a rank is slow, with its steps if it is not slow in all of them."""
    place = _in_phase(slow_rank.phase)
    is_slow_throughout = slow_rank.last_step - slow_rank.first_step + 1 >= steps
    if is_slow_throughout:
        return place
    return f"{place} (steps {slow_rank.first_step} to {slow_rank.last_step})"


def _ranks_with_verb(slow_ranks: Sequence[SlowRank], ranks: Ranks) -> str:
    """Return the ranks with their hosts and a verb.

    A slow host is named without its ranks. Of many ranks only the first is named.
    """
    finding = ranks.finding
    if finding.kind == "host":
        return f"the ranks of host {finding.host} are"
    numbers = sorted(slow_rank.rank for slow_rank in slow_ranks)
    count = len(numbers)
    if len(slow_ranks) == len(finding.slow):
        # The record may name only some of them, and has their number.
        count = max(count, finding.slow_ranks or 0)
    names = ranks_text(numbers)
    if count > _MOST_RANKS_NAMED:
        names = f"{count:,} of {ranks.world:,} ranks (the first is rank {numbers[0]})"
    verb = "is" if count == 1 else "are"
    if len(ranks.hosts) < 2:
        return f"{names} {verb}"
    hosts = sorted({slow_rank.host for slow_rank in slow_ranks})
    noun = "host" if len(hosts) == 1 else "hosts"
    return f"{names} ({noun} {', '.join(hosts)}) {verb}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
