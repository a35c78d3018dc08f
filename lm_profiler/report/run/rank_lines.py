"""The table and the lines of a run with several ranks: own work by phase, waiting, and who waits for whom."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean, median

from lm_profiler.record.figure import ms_text
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run_record import RANK_PARTS, Ranks, RankSpread, RunRecord, SlowRank
from lm_profiler.record.text import ranks_text
from lm_profiler.report.run.sections import table_of
from lm_profiler.report.tables.table import Table

WAITING = "waiting"
_NAMED = 16  # the most ranks that a line names one by one
_SEEN = 0.001  # the share of the mean step below which a phase's exposed communication is left out


def own_work_table(record: RunRecord) -> Table:
    """Return rows of each phase's own work, of waiting and of the step, for the median rank and both extremes."""
    ranks = record.ranks
    assert ranks is not None
    titles = ("phase", "own work (ms)", "share", "least (ms)", "most (ms)", "on rank")
    spreads = {part: spread for part in PARTS if (spread := ranks.own.get(part)) is not None and spread.largest_s}
    if (waiting := waiting_of(ranks)) is not None:
        spreads[WAITING] = waiting
    rows = [(part, _texts(part, spread, ranks.step_s)) for part, spread in spreads.items()]
    step = ["step", ms_text(ranks.step_s), *[""] * (len(titles) - 2)]
    known = {} if record.contended else {part: of for part, of in record.floors.items() if part in spreads}
    floors = {  # compared with own work: a rank cannot wait faster
        part: of.model_copy(update={"times": spreads[part].median_s / of.seconds if of.seconds else None})
        for part, of in known.items()
    }
    return table_of(titles, [*rows, ("step", step)], floors)


def _texts(title: str, spread: RankSpread, step_s: float) -> list[str]:
    """Return the texts of a row; the rank with most is named where ranks differ."""
    middle, least, most = map(ms_text, (spread.median_s, spread.least_s, spread.largest_s))
    share = f"{spread.median_s / step_s:.1%}" if step_s else ""
    return [title, middle, share, least, most, "" if least == most else str(spread.slowest)]


def waiting_of(ranks: Ranks) -> RankSpread | None:
    """Return the spread over the ranks of waiting in all phases; None without ranks."""
    seconds = {of.rank: of.all_waiting_s for of in ranks.by_rank}
    if not seconds:
        return None
    # With many ranks the record keeps only extreme ones, whose median is not the median of all.
    middle = median(seconds.values()) if len(seconds) == ranks.heard else ranks.waiting_share * ranks.step_s
    most = max(seconds, key=lambda rank: seconds[rank])
    return RankSpread(least_s=min(seconds.values()), median_s=middle, largest_s=seconds[most], slowest=most)


def ranks_lines(record: RunRecord) -> list[str]:
    """Return who waits for whom and what mending would save, and the lines on communication."""
    return [] if record.ranks is None else [f"ranks: {who_waits(record.ranks)}", *communication_lines(record.ranks)]


def communication_lines(ranks: Ranks) -> list[str]:
    """Return lines on communication, and the notes on the ranks."""
    exposed = {part: seconds for part, seconds in ranks.exposed_s.items() if seconds >= _SEEN * ranks.step_s}
    lines = []
    if exposed:
        told = ", ".join(f"{part} {ms_text(seconds)}" for part, seconds in exposed.items())
        lines.append(f"exposed communication: {told} ms a step ({ranks.exposed_source or 'of an unknown source'})")
    if ranks.communication_s and ranks.exposed_communication_s is not None:
        exposed_s, share = ranks.exposed_communication_s, ranks.exposed_communication_s / ranks.communication_s
        took = f"collectives: {ms_text(ranks.communication_s)} ms of a traced step"
        lines.append(f"{took}, waiting included, of which no compute hides {ms_text(exposed_s)} ms ({share:.0%})")
    return [*lines, *(f"note: {note}" for note in ranks.notes)]


def who_waits(ranks: Ranks) -> str:
    """Return which ranks the others wait for, how sure that is, and what mending would save."""
    of = ranks.finding
    waits = f"the mean rank waits {ms_text(ranks.waiting_share * ranks.step_s)} of {ms_text(ranks.step_s)} ms a step"
    if of.kind == "equal":
        return f"no rank is slower than the others; {waits}"
    if of.kind == "unsure":
        return f"{_doubted(ranks)}; {waits}"
    if of.saves_s is None:  # a kind that a later version has added
        return waits
    if of.kind == "turns":
        even = f"were all as the median rank, a step would be {_ms(of.saves_s)} shorter"
        return f"another rank is slow in {of.phase} each time; {waits}; {even}"
    it = "it" if of.kind == "straggler" else "them"
    said = [_slow(ranks)]
    if of.cause is not None:
        said.append(f"it spends that time {of.cause}" if of.kind == "straggler" else f"they spend it {of.cause}")
    if of.others_wait_s is not None and (of.slow_ranks or 1) < ranks.heard:
        said.append(f"the others wait {_ms(of.others_wait_s)} a step for {it}")
    interval = "" if of.low_s is None or of.high_s is None else f" [{of.low_s * 1e3:.1f}, {of.high_s * 1e3:.1f}]"
    said.append(f"mending {it} would save {_ms(of.saves_s)} a step{interval}")
    if of.last_in is not None:
        said.append(f"last in {of.last_in} of {of.steps or ranks.steps} steps")
    return "; ".join(said)


_DOUBTS = {"shared machine": "which other programs on this machine may have done", "chance": "perhaps by chance"}


def _doubted(ranks: Ranks) -> str:
    """Return which rank may be slow, and why that is not sure."""
    of = ranks.finding
    why = _DOUBTS.get(of.doubt or "", f"too few steps ({of.steps}) to be sure")
    if not of.slow and of.phase is None:
        return f"who waits for whom is unknown: {why}"
    who = "another rank" if of.rank is None else f"rank {of.rank}"
    return f"{_slow(ranks) if of.slow else f'{who} is slow in {of.phase} in some steps'}, {why}"


def _slow(ranks: Ranks) -> str:
    """Return ``rank 1 is 30.0 ms slower in data``; ranks that are slow in the same steps of a phase share a phrase."""
    of = ranks.finding
    alike: defaultdict[str, list[SlowRank]] = defaultdict(list)
    for one in of.slow:
        whole = one.last_step - one.first_step + 1 >= (of.steps or 0)
        where = one.phase if one.phase == RANK_PARTS[-1] else f"in {one.phase}"
        alike[where if whole else f"{where} (steps {one.first_step} to {one.last_step})"].append(one)
    if not alike:  # a record of version 0.2, which names one rank or one host in one phase
        who = f"rank {of.rank}" if of.rank is not None else f"host {of.host}"
        return f"{who}: {_ms(of.excess_s or 0.0)} slower" + (f" in {of.phase}" if of.phase else "")
    told = ((_who(its, ranks), _ms(fmean(one.excess_s for one in its)), where) for where, its in alike.items())
    return "; ".join(f"{who} {more} slower {where}" for who, more, where in told)


def _who(its: list[SlowRank], ranks: Ranks) -> str:
    """Return the ranks with their hosts; all ranks of a host by its name, and the first one of many."""
    if ranks.finding.kind == "host":
        return f"the ranks of host {ranks.finding.host} are"
    named, hosts = sorted(one.rank for one in its), sorted({one.host for one in its})
    count = max(len(named), (ranks.finding.slow_ranks or 0) if its == ranks.finding.slow else 0)
    who = ranks_text(named) if count <= _NAMED else f"{count:,} of {ranks.world:,} ranks, {named[0]} the first,"
    where = f" (host{'s' * (len(hosts) > 1)} {', '.join(hosts)})" if len(ranks.hosts) > 1 else ""
    return f"{who}{where} {'is' if count == 1 else 'are'}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
