"""What stands below a table: commands for runs that did not fit, and the best of a sweep's checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from lm_profiler.analysis.compare.comparison import compare
from lm_profiler.record.calls import command_line
from lm_profiler.record.entry import Entry
from lm_profiler.record.quantities import QUANTITIES, bytes_text
from lm_profiler.record.run import RecordError
from lm_profiler.record.secrets import masked_line
from lm_profiler.usage_error import UsageError

_MOST = 5  # the most runs that a table gives advice for


def remedies(entries: Sequence[Entry]) -> list[str]:
    """Return, for each of ``entries`` that did not fit, a command that would fit as planned, and other options."""
    advice: dict[tuple[str, ...], list[str]] = {}
    for entry in entries:
        if lines := tuple(_remedies(entry)):
            advice.setdefault(lines, [f"{entry.name}:", *lines])  # repeats end alike and are told once
    shown = [line for lines in list(advice.values())[:_MOST] for line in lines]
    return shown + [f"{len(advice) - _MOST} more did not fit"] * (len(advice) > _MOST)


def _remedies(entry: Entry) -> Iterator[str]:
    if entry.status not in ("oom", "refused"):
        return
    failure = entry.record.failure if entry.record is not None else None
    if failure is not None and failure.remedies:
        first, *others = failure.remedies
        yield f"  would fit, as planned: {_command(entry)} {first}"
        if others:
            yield f"  or instead: {' or '.join(others)}"
    elif (command := _command(entry).replace(" -m lm_profiler fit ", " -m lm_profiler plan ", 1)) != _command(entry):
        yield f"  what would fit: {command}"


def _command(entry: Entry) -> str:
    if entry.cell is None:
        return entry.record.command if entry.record is not None else ""
    own = [given for given in entry.cell.arguments if not given.startswith(("--log_dir=", "--name="))]
    return command_line(masked_line(own))


# -- the best of a sweep's checkpoints ---------------------------------------------------------------------------------

_EVERY = "model.checkpoint_every"

# cells that differ in nothing else, by the blocks of a checkpoint and those nested in it; () is none
Checkpoints = Mapping[tuple[int, ...], Sequence[Entry]]


def best_checkpoints(entries: Sequence[Entry]) -> list[str]:
    """Return, for cells of a sweep that differ in their checkpoints alone, a line that names the smallest peak."""
    alike: dict[tuple[object, ...], dict[tuple[int, ...], list[Entry]]] = {}
    for entry in entries:
        if entry.cell is not None and _EVERY in entry.overrides:
            rest = tuple((name, value) for name, value in sorted(entry.overrides.items()) if name != _EVERY)
            every = entry.option(_EVERY)
            key = (every,) if isinstance(every, int) else tuple(every or ())
            alike.setdefault((entry.sweep, *rest), {}).setdefault(key, []).append(entry)
    several = len(alike) > 1
    lines = ((_best(of), next(iter(of.values()))[0].overrides) for of in alike.values())
    return [_of(overrides) * several + line for line, overrides in lines if line]


def _of(overrides: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in overrides.items() if name != _EVERY) + ": "


def _best(checkpoints: Checkpoints) -> str | None:
    allocated = _peaks(checkpoints, "allocated_peak_bytes")
    word, peaks = ("measured", allocated) if allocated else ("planned", _peaks(checkpoints, "planned_peak_bytes"))
    tried = sorted(peaks)
    if len(tried) < 2:
        return None
    best = min(tried, key=lambda every: peaks[every])  # of equal ones the first, which is none where that is as good
    at = tried.index(best)
    others = [every for every in tried[max(at - 1, 0) : at + 2] if every not in (best, ())]
    beside = [f"{_named(every)} {bytes_text(peaks[every])}" for every in [()] * (best != () in peaks) + others]
    line = f"checkpoint_every={_named(best)} has the smallest peak ({word}), {bytes_text(peaks[best])}"
    return f"{line}; {', '.join(beside)}{_cost(checkpoints, best)}"


def _peaks(checkpoints: Checkpoints, name: str) -> dict[tuple[int, ...], int]:
    of = QUANTITIES[name]
    known = {every: [of.get(e.record) for e in cells if e.record is not None] for every, cells in checkpoints.items()}
    return {every: max(filter(None, of_cells)) for every, of_cells in known.items() if any(of_cells)}


def _named(every: tuple[int, ...]) -> str:
    return "null" if not every else str(every[0]) if len(every) == 1 else str([*every])


def _cost(checkpoints: Checkpoints, best: tuple[int, ...]) -> str:
    good = {every: [cell for cell in checkpoints.get(every, ()) if cell.status == "ok"] for every in ((), best)}
    if not best or not all(good.values()):
        return ""
    try:
        ratio = compare(good[()], good[best]).step.interval
    except (RecordError, UsageError):
        return ""
    return "" if ratio is None else f"; its step takes {ratio.ratio:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] of null's"
