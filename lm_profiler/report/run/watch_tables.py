"""The tables of a watched run: the ledger, the phases, events, and each rank."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import reduce
from pathlib import Path

from lm_profiler.record import watch_files
from lm_profiler.record.figure import share_text
from lm_profiler.record.parts import TIMED
from lm_profiler.record.quantities import bytes_text, counted, duration_text
from lm_profiler.record.watch_files import Sketch, WatchEvent, WatchStatus, WatchWindow, process_has_ended
from lm_profiler.report.tables.table import Table, text_table

_EVENTS = 12
_SHARE_SHOWN = 0.001  # share of slow steps from which on it is printed


def is_watched(folder: Path) -> bool:
    return (folder / watch_files.STATUS).exists()


def watch_tables(folder: Path, events: int = _EVENTS) -> list[Table]:
    """Return tables on the watched run in ``folder``: the state, the ledger, the phases, the last events, the ranks."""
    watched = watch_files.read_watched(folder)
    ranks, windows, told = watched.ranks, watched.windows, watched.events
    status = ranks[0]
    last = [[_clock(of.at_s), f"{of.step:,}", event_text(of, status.world_size)] for of in told[-events:]]
    return [
        Table(title="Watch", above=_state(status, windows)),
        _ledger(status),
        *([_phases(windows)] if windows else []),
        *([_ranks(ranks)] if len(ranks) > 1 else []),
        Table(above=[f"{counted(len(told), 'event')}{', the last of them:' if told else ''}"]),
        *([text_table(("when", "step", "what"), last, left=3)] if told else []),
    ]


def _state(status: WatchStatus, windows: Sequence[WatchWindow]) -> list[str]:
    good = "" if status.goodput is None else f", goodput {status.goodput:.1%} (training steps after the first)"
    where = f"in {status.phase} at {_clock(status.written_s)}"
    how = where
    if status.error is not None:
        how = f"failed with {status.error}"
    elif status.ended:
        how = "ended"
    elif process_has_ended(status.process):
        how = f"killed, last {where}"
    resumed = f"; went on from step {status.resumed_at:,}" if status.resumed_at else ""
    if status.repeated is not None:
        resumed += f", {counted(status.repeated, 'step')} of the run before it repeated"
    state = f"{how}: {counted(status.steps, 'step')} in {duration_text(status.wall_s)}{good}{resumed}"
    if status.held_bytes is None:
        return [state]
    held = [each.held_bytes for each in windows if each.held_bytes is not None]
    since = f", {bytes_text(held[0])} in the first thousand steps" if len(windows) > 1 and held else ""
    peaks = [each.peak_bytes for each in windows if each.peak_bytes is not None]
    peak = f"; peak by now: {bytes_text(max(peaks))}" if peaks else ""
    return [state, f"held between steps: {bytes_text(status.held_bytes)}{since}{peak}"]


def _ledger(status: WatchStatus) -> Table:
    terms = [*sorted(status.ledger.items(), key=lambda each: -each[1]), ("wall time", status.wall_s)]
    rows = [[what, f"{s:,.1f}", share_text(s / status.wall_s if status.wall_s else None)] for what, s in terms]
    return text_table(("where the time went", "s", "share"), rows)


def _phases(windows: Sequence[WatchWindow]) -> Table:
    """Return the step and its parts over all windows, and the mean of the first and the last of them."""
    rows = []
    for part in TIMED:
        sketches = [each.seconds.get(part, Sketch()) for each in windows]
        if (whole := reduce(Sketch.merge, sketches)).count:
            quantiles = (whole.quantile(0.5), whole.quantile(0.99))
            figures = (whole.mean, *quantiles, whole.max, sketches[0].mean, sketches[-1].mean)
            rows.append([part, *("" if each is None else f"{each * 1e3:,.3f}" for each in figures)])
    return text_table(("ms", "mean", "median", "p99", "longest", "first window", "last window"), rows)


def _ranks(ranks: Sequence[WatchStatus]) -> Table:
    silent = ranks[0].silent  # as rank 0 saw it: the clocks of other ranks and of this machine may differ
    rows = []
    for status in ranks:
        since = f"silent since {_clock(silent[status.rank])} in {status.phase}" if status.rank in silent else None
        now = since or (f"killed, last in {status.phase}" if process_has_ended(status.process) else status.phase)
        if status.error is not None:
            now = f"failed with {status.error}"
        elif status.ended:
            now = "ended"
        rows.append([str(status.rank), f"{status.steps:,}", now])
    return text_table(("rank", "steps", "now"), rows)


def event_text(event: WatchEvent, world_size: int = 1) -> str:
    """Return what happened in one line: what, how much, where, and why if that is known."""
    text = _what_happened(event)
    if event.full_in_s is not None:
        text += f": full in {duration_text(event.full_in_s)}"
    if event.cause is not None:
        text += f": {event.cause}"
    if world_size > 1:
        text += f", rank {event.rank} of {world_size}"
    elif event.rank:
        text += f", rank {event.rank}"
    if event.trace:
        text += f"; trace: {event.trace}"
    return text


def _what_happened(event: WatchEvent) -> str:
    part = "" if event.part is None else f" in {event.part}"
    duration = duration_text(event.now)
    usually = "" if event.against is None else f", usually {duration_text(event.against)}"
    if event.kind == "stall":
        return f"stalled{part} since {_clock(event.at_s - event.now)}, for {duration} by then"
    if event.kind == "silent rank":
        return f"no report: stalled{part} since {_clock(event.at_s - event.now)}"
    if event.kind == "memory":
        return _memory_text(event)
    if event.kind == "rank late":
        cost = "" if event.cost_s is None else f"; the others waited {duration_text(event.cost_s)}"
        return f"{'always' if event.chronic else 'once'} late{part}: {duration}{usually}{cost}"
    if event.kind == "level":
        return _level_text(event, part)
    if event.kind == "slow step":
        return _slow_steps_text(event, f"{duration}{part}{usually}")
    if event.course == "drift":
        grew = f"{event.kind}: {duration_text(event.against or 0.0)} → {duration}"
        end = "" if event.until_step is None else f" until step {event.until_step:,}"
        return f"{grew} since step {event.since_step:,}{end}"
    times = f" ({event.times} times)" if event.times > 1 else ""
    return f"{event.kind}: {duration}{usually}{times}"


def _memory_text(event: WatchEvent) -> str:
    if event.until_step is None:
        return f"memory grows by {bytes_text(round(event.now))} an hour"
    return f"memory grew by {bytes_text(event.grew_bytes or 0)} until step {event.until_step:,}, no longer"


def _level_text(event: WatchEvent, part: str) -> str:
    before = duration_text(event.against or 0.0)
    now = duration_text(event.now)
    since = f"since step {event.since_step:,}"
    if event.course == "wanders":
        return f"the step wanders between {before} and {now}{part} {since}: {event.times} changes"
    if event.course == "alternates":
        return f"the step alternates between {before} and {now}{part} {since}: {event.times} changes"
    ratio = event.ratio or 1.0
    change = "slower" if ratio > 1 else "faster"
    change = f"{abs(ratio - 1):.1%} {change}"
    if event.course == "drift":
        change = f"slowly {change}"
    if event.until_step is not None:
        since = f"from step {event.since_step:,} to {event.until_step:,}"
    return f"{change} {since}: {before} → {now}{part}"


def _slow_steps_text(event: WatchEvent, step: str) -> str:
    """Return the text of one slow step or of a group of them; ``step`` is how long they take."""
    if event.times == 1:
        return f"slow step: {step}"
    rhythm = ""
    if event.starts_epochs:
        rhythm = ", each the first of an epoch"
    elif event.every_steps is not None:
        rhythm = f", every {event.every_steps:,} steps"
    elif event.share is not None and event.share >= _SHARE_SHOWN:
        rhythm = f", {event.share:.1%} of the steps"
    cost = "" if event.cost_s is None else f"; they cost {duration_text(event.cost_s)} together"
    return f"{event.times:,} slow steps{rhythm}: {step}{cost}"


def _clock(at_s: float) -> str:
    """Return the local time at ``at_s`` seconds since 1970; a damaged file may hold times that no calendar has."""
    try:
        moment = datetime.fromtimestamp(at_s).astimezone()
    except (ValueError, OverflowError, OSError):
        return "an unknown time"
    return moment.strftime("%m-%d %H:%M:%S")
