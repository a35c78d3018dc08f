"""The tables of a watched run: its state, the ledger, the phases, the ranks and the events."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import reduce
from pathlib import Path

from lm_profiler.record import watch_files
from lm_profiler.record.figure import share_text
from lm_profiler.record.parts import TIMED
from lm_profiler.record.quantities import bytes_text, count_text, duration_text
from lm_profiler.record.run_record import NO_CPU
from lm_profiler.record.watch_files import (
    Sketch,
    WatchEvent,
    WatchStatus,
    WatchWindow,
    process_has_ended,
)
from lm_profiler.report.tables.table import Table, text_table

_MOST_EVENTS = 12
_FAST_GROWTH = (
    2.0**20
)  # faster growth of memory is printed in bytes per second, not per hour
_LEAST_SHARE = 0.001  # a smaller share of slow steps is not printed


def is_watched(folder: Path) -> bool:
    return (folder / watch_files.STATUS).exists()


def watch_tables(folder: Path, most_events: int = _MOST_EVENTS) -> list[Table]:
    """Return tables about the watched run in ``folder``: state, ledger, phases, ranks, and the last events."""
    watched = watch_files.read_watched(folder)
    status = watched.ranks[0]
    tables = [
        Table(title="Watch", above=_state_lines(status, watched.windows)),
        _ledger_table(status),
    ]
    if watched.windows:
        tables.append(_phase_table(watched.windows))
    if len(watched.ranks) > 1:
        tables.append(_rank_table(watched.ranks))
    number_of_events = count_text(len(watched.events), "event")
    if not watched.events:
        return [*tables, Table(above=[number_of_events])]
    tables.append(Table(above=[f"{number_of_events}, the last of them:"]))
    tables.append(_event_table(watched.events[-most_events:], status.world_size))
    return tables


def _event_table(events: Sequence[WatchEvent], world_size: int) -> Table:
    """Return a row for each event: its time of day, its step, and what happened."""
    rows = [
        [_clock_text(event.at_s), f"{event.step:,}", event_text(event, world_size)]
        for event in events
    ]
    return text_table(("when", "step", "what"), rows, left=3)


def _state_lines(status: WatchStatus, windows: Sequence[WatchWindow]) -> list[str]:
    """Return lines on how many steps are done, the goodput, and the memory in use."""
    line = f"{_process_state_text(status)}: {count_text(status.steps, 'step')} in {duration_text(status.wall_s)}"
    if status.goodput is not None:
        line += (
            f", goodput {status.goodput:.1%} (wall time spent in steps after the first)"
        )
    if status.resumed_at:
        line += f"; continued from step {status.resumed_at:,}"
    if status.repeated is not None:
        line += f", repeated {count_text(status.repeated, 'step')} of the previous run"
    if status.held_bytes is None:
        return [line]
    return [line, _memory_line(status.held_bytes, windows)]


def _process_state_text(status: WatchStatus) -> str:
    """Return the phase that the process is in, or how it ended."""
    if status.error is not None:
        return f"failed with {status.error}"
    if status.ended:
        return "ended"
    place = f"in {status.phase} at {_clock_text(status.written_s)}"
    if process_has_ended(status.process):
        return f"killed, last {place}"
    return place


def _memory_line(held_bytes: int, windows: Sequence[WatchWindow]) -> str:
    """Return the bytes held between steps: now, in the first window, and at the peak."""
    line = f"held between steps: {bytes_text(held_bytes)}"
    held_by_window = []
    for window in windows:
        if window.held_bytes is not None:
            held_by_window.append(window.held_bytes)
    if len(windows) > 1 and held_by_window:
        line += f", {bytes_text(held_by_window[0])} in the first thousand steps"
    peaks = [window.peak_bytes for window in windows if window.peak_bytes is not None]
    if peaks:
        line += f"; peak by now: {bytes_text(max(peaks))}"
    return line


def _ledger_table(status: WatchStatus) -> Table:
    """Return a table of what took the training's time, the longest first, and the wall time at the end."""
    terms = sorted(status.ledger.items(), key=lambda term: -term[1])
    terms.append(("wall time", status.wall_s))
    rows = []
    for name, seconds in terms:
        share = None
        if status.wall_s:
            share = seconds / status.wall_s
        rows.append([name, f"{seconds:,.1f}", share_text(share)])
    return text_table(("where the time went", "s", "share"), rows)


def _phase_table(windows: Sequence[WatchWindow]) -> Table:
    """Return a table of the step and its parts over all windows, and in the first and the last of several."""
    headings = ["ms", "mean", "median", "p99", "longest"]
    has_several_windows = len(windows) > 1
    if has_several_windows:
        headings += ["first window", "last window"]
    rows = []
    for part in TIMED:
        sketches = [window.seconds.get(part, Sketch()) for window in windows]
        whole_run = reduce(Sketch.merge, sketches)
        if not whole_run.count:
            continue
        figures = [
            whole_run.mean,
            whole_run.quantile(0.5),
            whole_run.quantile(0.99),
            whole_run.max,
        ]
        if has_several_windows:
            figures += [sketches[0].mean, sketches[-1].mean]
        rows.append([part, *(_milliseconds_text(seconds) for seconds in figures)])
    return text_table(headings, rows)


def _milliseconds_text(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1e3:,.3f}"


def _rank_table(statuses: Sequence[WatchStatus]) -> Table:
    """Return a table with a row for each rank: its steps, and whether it still reports."""
    # Rank 0 determines which ranks are silent, because the clocks of the other ranks and of this machine may differ.
    silent = statuses[0].silent
    rows = []
    for status in statuses:
        rows.append(
            [
                str(status.rank),
                f"{status.steps:,}",
                _rank_state_text(status, silent.get(status.rank)),
            ]
        )
    return text_table(("rank", "steps", "now"), rows)


def _rank_state_text(status: WatchStatus, silent_since_s: float | None) -> str:
    """Return the phase that a rank is in, or how it ended."""
    if status.error is not None:
        return f"failed with {status.error}"
    if status.ended:
        return "ended"
    if silent_since_s is not None:
        return f"silent since {_clock_text(silent_since_s)} in {status.phase}"
    if process_has_ended(status.process):
        return f"killed, last in {status.phase}"
    return status.phase


def event_text(event: WatchEvent, world_size: int = 1) -> str:
    """Return one line about an event: what happened, how much, where, and the cause if it is known."""
    text = _event_without_cause(event)
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


def _event_without_cause(event: WatchEvent) -> str:
    """Return what happened, where and how much, without the cause."""
    part = ""
    if event.part is not None:
        part = f" in {event.part}"
    if event.kind == "stall":
        return f"stalled{part} since {_clock_text(event.at_s - event.now)}, for {duration_text(event.now)} so far"
    if event.kind == "silent rank":
        place = f" (last{part})" if part else ""
        return f"no report since {_clock_text(event.at_s - event.now)}{place}"
    if event.kind == "memory":
        return _memory_text(event)
    if event.kind == "level":
        return _level_text(event, part)
    if event.kind == "slow step":
        return _slow_steps_text(event, _duration_text(event, part))
    if event.kind == "rank late":
        return _late_rank_text(event, part)
    return _outside_text(event)


def _duration_text(event: WatchEvent, part: str = "") -> str:
    """Return how long the subject of an event took, and how long it usually takes."""
    text = f"{duration_text(event.now)}{part}"
    if event.against is not None:
        text += f", usually {duration_text(event.against)}"
    return text


def _late_rank_text(event: WatchEvent, part: str) -> str:
    """Return how late a rank was, and what that cost the others; ``part`` is the text `` in PHASE``, or empty."""
    lateness = "always late" if event.chronic else "late once"
    text = f"{lateness}{part}: {_duration_text(event)}"
    if event.cost_s is not None:
        text += f"; the others waited {duration_text(event.cost_s)}"
    return text


def _outside_text(event: WatchEvent) -> str:
    """Return the text of validations, checkpoints or epoch boundaries that take long."""
    if event.course == "drift":
        beginning = duration_text(event.against or 0.0)
        text = f"{event.kind}: {beginning} → {duration_text(event.now)} since step {event.since_step:,}"
        if event.until_step is not None:
            text += f" until step {event.until_step:,}"
        return text
    text = f"{event.kind}: {_duration_text(event)}"
    if event.times > 1:
        text += f" ({event.times} times)"
    if event.share is not None:
        text += f", {event.share:.0%} of the time"
    return text


def _memory_text(event: WatchEvent) -> str:
    """Return the text of growing memory: per second if it is fast, else per hour; and from how much to how much."""
    grew_bytes = event.grew_bytes or 0
    amounts = ""
    if event.held_bytes is not None:  # older files do not have it
        begin_bytes = event.held_bytes - grew_bytes
        amounts = f", from {bytes_text(begin_bytes)} to {bytes_text(event.held_bytes)}"
    if event.until_step is not None:
        until = f"until step {event.until_step:,}, then stopped growing"
        return f"memory grew by {bytes_text(grew_bytes)}{amounts}, {until}"
    rate = f"{bytes_text(round(event.now))} per hour"
    bytes_per_s = event.now / 3600.0
    if bytes_per_s >= _FAST_GROWTH:
        rate = f"{bytes_text(bytes_per_s)} per second"
    since = ""
    if event.since_step is not None:
        since = f" since step {event.since_step:,}, by {bytes_text(grew_bytes)} so far"
    return f"memory grows by {rate}{since}{amounts}"


def _level_text(event: WatchEvent, part: str) -> str:
    """Return the text of a change of the level of step times; ``part`` names the phase that changed."""
    old_level = duration_text(event.against or 0.0)
    new_level = duration_text(event.now)
    span = f"since step {event.since_step:,}"
    if event.in_all_parts:
        part = " in all phases alike"
    if event.course in ("wanders", "alternates"):
        return f"the step time {event.course} between {old_level} and {new_level}{part} {span}: {event.times} changes"
    ratio = event.ratio or 1.0
    direction = "slower" if ratio > 1 else "faster"
    change = f"{abs(ratio - 1):.1%} {direction}"
    if event.course == "drift":
        change = f"gradually {change}"
    if event.until_step is not None:
        span = f"from step {event.since_step:,} to {event.until_step:,}"
    # The levels are those of the whole step, so the part does not stand beside them.
    return f"{change}{part} {span}: the step takes {new_level}, before {old_level}"


def _slow_steps_text(event: WatchEvent, step: str) -> str:
    """Return the text of one slow step or of a group of them; ``step`` is how long they take."""
    if event.times == 1:
        return f"slow step: {step}"
    text = f"{event.times:,} slow steps"
    if event.starts_epochs:
        text += ", each the first of an epoch"
    elif event.every_steps is not None:
        text += f", every {event.every_steps:,} steps"
    elif event.share is not None and event.share >= _LEAST_SHARE:
        text += f", {event.share:.1%} of the steps"
    text += f": {step}"
    first_s, last_s = event.grew_from_s, event.grew_to_s
    is_busy_machine = (
        event.cause == NO_CPU
    )  # then growth says nothing about the program
    if first_s is not None and last_s is not None and not is_busy_machine:
        first, last = duration_text(first_s), duration_text(last_s)
        text += f"; they take longer and longer, {first} → {last}"
    if event.cost_s is not None:
        text += f"; they cost {duration_text(event.cost_s)} together"
    return text


def _clock_text(at_s: float) -> str:
    """Return the local time at ``at_s`` seconds since 1970; a damaged file may hold times that no calendar has."""
    try:
        moment = datetime.fromtimestamp(at_s).astimezone()
    except (ValueError, OverflowError, OSError):
        return "an unknown time"
    return moment.strftime("%m-%d %H:%M:%S")
