"""What is shown of a run that is watched until it ends: the ledger, the phases, events, and each rank."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from lm_profiler.record.parts import TIMED
from lm_profiler.record.quantities import bytes_text, counted, duration_text
from lm_profiler.record.watch_files import (
    STATUS,
    Sketch,
    WatchEvent,
    WatchStatus,
    WatchWindow,
    ranks_watched,
    read_events,
    read_status,
    read_windows,
)
from lm_profiler.report.tables.table import Table, text_table

_EVENTS = 12


def is_watched(folder: Path) -> bool:
    """Return whether the run in ``folder`` was watched."""
    return (folder / STATUS).exists()


def watch_tables(folder: Path, events: int = _EVENTS) -> list[Table]:
    """Return tables on the watched run in ``folder``: the state, the ledger, the phases, the last events, the ranks."""
    status, windows, told = read_status(folder), read_windows(folder), read_events(folder)
    ranks = [read_status(folder, rank) for rank in ranks_watched(folder)]
    return [
        Table(title="Watch", above=[_state(status), *_memory(status, windows)]),
        _ledger(status),
        *_phases([*windows, *([status.window] if status.window is not None else [])]),
        *([_ranks(ranks)] if len(ranks) > 1 else []),
        Table(above=[f"{counted(len(told), 'event')}{', the last of them:' if told else ''}"]),
        *([_events(told[-events:], status.world_size)] if told else []),
    ]


def _state(status: WatchStatus) -> str:
    good = "" if status.goodput is None else f", goodput {status.goodput:.1%} (training steps after the first)"
    how = "ended" if status.ended else f"in {status.phase} at {_clock(status.written_s)}"
    resumed = f"; went on from step {status.resumed_at:,}" if status.resumed_at else ""
    if status.repeated is not None:
        resumed += f", {counted(status.repeated, 'step')} of the run before it repeated"
    return f"{how}: {counted(status.steps, 'step')} in {duration_text(status.wall_s)}{good}{resumed}"


def _memory(status: WatchStatus, windows: Sequence[WatchWindow]) -> list[str]:
    held = [each.held_bytes for each in windows if each.held_bytes is not None]
    if status.held_bytes is None:
        return []
    since = f", {bytes_text(held[0])} in the first thousand steps" if held else ""
    return [f"held between steps: {bytes_text(status.held_bytes)}{since}"]


def _ledger(status: WatchStatus) -> Table:
    rows = [
        [what, f"{seconds:,.1f}", f"{seconds / status.wall_s:.1%}" if status.wall_s else ""]
        for what, seconds in sorted(status.ledger.items(), key=lambda each: -each[1])
    ]
    return text_table(("where the time went", "s", "share"), [*rows, ["wall time", f"{status.wall_s:,.1f}", "100.0%"]])


def _phases(windows: Sequence[WatchWindow]) -> list[Table]:
    if not windows:
        return []
    rows = []
    for part in TIMED:
        sketches = [each.seconds.get(part, Sketch()) for each in windows]
        whole = Sketch()
        for each in sketches:
            whole = whole.merged(each)
        if whole.count:
            quantiles = (whole.quantile(0.5), whole.quantile(0.99))
            figures = (whole.mean, *quantiles, whole.max, sketches[0].mean, sketches[-1].mean)
            rows.append([part, *("" if each is None else f"{each * 1e3:,.3f}" for each in figures)])
    titles = ("ms", "mean", "median", "p99", "longest", "first window", "last window")
    return [text_table(titles, rows)]


def _ranks(ranks: Sequence[WatchStatus]) -> Table:
    silent = ranks[0].silent  # as rank 0 saw it: neither the other ranks' clocks nor this machine's need agree
    rows = []
    for status in ranks:
        since = f"silent since {_clock(silent[status.rank])} in {status.phase}" if status.rank in silent else None
        rows.append([str(status.rank), f"{status.steps:,}", "ended" if status.ended else since or status.phase])
    return text_table(("rank", "steps", "now"), rows)


def _events(events: Sequence[WatchEvent], world_size: int) -> Table:
    rows = [[_clock(event.at_s), f"{event.step:,}", event_text(event, world_size)] for event in events]
    return text_table(("when", "step", "what"), rows, left=3)


def event_text(event: WatchEvent, world_size: int = 1) -> str:
    """Return an event of a run of so many ranks in a sentence."""
    part = "" if event.part is None else f" in {event.part}"
    against = "" if event.against is None else f", not {duration_text(event.against)}"
    words = {
        "slow step": f"slow step: {duration_text(event.now)}{against}{part}",
        "stall": f"stalled for {duration_text(event.now)}{part}",
        "memory": f"memory grows by {bytes_text(round(event.now))} an hour" if event.kind == "memory" else "",
        "silent rank": f"no report: stalled{part} since {_clock(event.at_s - event.now)}",
        "rank late": f"{'always' if event.chronic else 'once'} late{part}: {duration_text(event.now)}{against}",
    }
    text = words.get(event.kind, f"{event.kind}: {duration_text(event.now)}{against}{part}")
    if event.kind == "level" and event.ratio is not None:
        change = "slower" if event.ratio > 1 else "faster"
        since = f"since step {event.since_step:,}"
        text = f"{abs(event.ratio - 1):.1%} {change} {since}: {duration_text(event.now)}{against}{part}"
    if event.full_in_s is not None:
        text += f": full in {duration_text(event.full_in_s)}"
    if event.cost_s is not None:
        text += f"; the others waited {duration_text(event.cost_s)}"
    if event.cause is not None:
        text += f": {event.cause}"
    elif event.beside:
        text += f" ({event.beside})"
    times = f" ({event.times} times)" if event.times > 1 else ""
    rank = f", rank {event.rank}{f' of {world_size}' if world_size > 1 else ''}" if world_size > 1 or event.rank else ""
    return f"{text}{times}{rank}{f'; trace: {event.trace}' if event.trace else ''}"


def _clock(at_s: float) -> str:
    return datetime.fromtimestamp(at_s).astimezone().strftime("%m-%d %H:%M:%S")
