"""Lines below a table of runs: commands for runs that did not fit, and a sweep's best activation checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lm_profiler.analysis.compare.comparison import compare
from lm_profiler.record.calls import command_line
from lm_profiler.record.entry import Entry
from lm_profiler.record.quantities import QUANTITIES, bytes_text
from lm_profiler.record.run_record import RecordError
from lm_profiler.record.secrets import mask_line
from lm_profiler.usage_error import UsageError

_LISTED_RUNS = 5  # the most runs for which a table lists remedies


def remedies(entries: Sequence[Entry]) -> list[str]:
    """Return, for each run that did not fit into memory, a command that fits according to the plan, and alternatives.

    Runs with the same remedies, such as repeats, are listed once, under the first one's name.
    """
    names: dict[tuple[str, ...], str] = {}
    for entry in entries:
        commands = tuple(_remedy_lines(entry))
        if commands:
            names.setdefault(commands, entry.name)
    lines: list[str] = []
    for commands, name in list(names.items())[:_LISTED_RUNS]:
        lines += [f"{name}:", *commands]
    if len(names) > _LISTED_RUNS:
        lines.append(f"{len(names) - _LISTED_RUNS} more did not fit into memory")
    return lines


def _remedy_lines(entry: Entry) -> list[str]:
    """Return lines with the options with which a run would fit that did not; none for other runs.

    If nothing was planned, the line has the command that finds such options.
    """
    if entry.status not in ("oom", "refused"):
        return []
    command = _command_text(entry)
    failure = entry.record.failure if entry.record is not None else None
    if failure is not None and failure.remedies:
        best, *alternatives = failure.remedies
        lines = [f"  would fit, as planned: {command} {best}"]
        if alternatives:
            lines.append(f"  or instead: {' or '.join(alternatives)}")
        return lines
    if " -m lm_profiler fit " in command:
        plan_command = command.replace(
            " -m lm_profiler fit ", " -m lm_profiler plan ", 1
        )
        return [f"  to find what fits: {plan_command}"]
    return []


def _command_text(entry: Entry) -> str:
    """Return the command of a run; that of a cell is without the name and folder that the sweep gave it."""
    if entry.cell is not None:
        words = []
        for word in entry.cell.arguments:
            if not word.startswith(("--log_dir=", "--name=")):
                words.append(word)
        return command_line(mask_line(words))
    if entry.record is not None:
        return entry.record.command
    return ""


# -- the best of a sweep's checkpoints ---------------------------------------------------------------------------------

_OPTION = "model.checkpoint_every"

# The blocks per checkpoint, followed by the blocks per nested checkpoint; () for a cell without checkpoints.
Blocks = tuple[int, ...]

# cells that differ only in their checkpoints
CellsByBlocks = Mapping[Blocks, Sequence[Entry]]


def best_checkpoints(entries: Sequence[Entry]) -> list[str]:
    """Return a line for each family of cells with the checkpoints that have the smallest peak of memory.

    The cells of a family belong to one sweep, and differ only in their checkpoints.
    """
    # sweep and text of the other options → checkpoints → cells
    families: dict[tuple[Path | None, str], dict[Blocks, list[Entry]]] = {}
    for entry in entries:
        if entry.cell is None or _OPTION not in entry.overrides:
            continue
        other_options = []
        for name, value in entry.overrides.items():
            if name != _OPTION:
                other_options.append(f"{name}={value}")
        family = families.setdefault((entry.sweep, ", ".join(other_options)), {})
        family.setdefault(_blocks_of_cell(entry), []).append(entry)

    several_sweeps = len({sweep for sweep, _ in families}) > 1
    lines = []
    for (sweep, options_text), cells in families.items():
        line = _best_line(cells)
        if line is None:
            continue
        labels = [options_text]
        if several_sweeps and sweep is not None:
            labels.insert(0, sweep.name)
        label = ", ".join(filter(None, labels))
        lines.append(f"{label}: {line}" if len(families) > 1 else line)
    return lines


def _blocks_of_cell(entry: Entry) -> Blocks:
    """Return the cell's option, a number or a list of numbers, as a tuple; empty without checkpoints."""
    value = entry.option(_OPTION)
    if isinstance(value, int):
        return (value,)
    return tuple(value or ())


def _best_line(cells: CellsByBlocks) -> str | None:
    """Return a line on the checkpoints with the smallest peak and their neighbours; None without two peaks."""
    source = "measured"
    peaks = _largest_peaks(cells, "allocated_peak_bytes")
    if not peaks:
        source = "planned"
        peaks = _largest_peaks(cells, "planned_peak_bytes")
    if len(peaks) < 2:
        return None
    in_order = sorted(peaks)
    # Of equal peaks the first is chosen, which has no checkpoints if possible.
    best = min(in_order, key=lambda blocks: peaks[blocks])
    position = in_order.index(best)
    neighbours = in_order[max(position - 1, 0) : position + 2]
    # without any checkpoints first, then the neighbours
    compared = [blocks for blocks in neighbours if blocks not in (best, ())]
    if best != () and () in peaks:
        compared.insert(0, ())
    line = f"checkpoint_every={_blocks_text(best)} has the smallest peak ({source}), {bytes_text(peaks[best])}"
    texts = []
    for blocks in compared:
        texts.append(f"{_blocks_text(blocks)} {bytes_text(peaks[blocks])}")
    return f"{line}; {', '.join(texts)}{_cost_text(cells, best)}"


def _largest_peaks(cells: CellsByBlocks, figure_name: str) -> dict[Blocks, int]:
    """Return the largest peak of each setting's cells; a setting without a known peak is left out."""
    get = QUANTITIES[figure_name].get
    largest = {}
    for blocks, entries in cells.items():
        peaks = []
        for entry in entries:
            if entry.record is not None:
                peaks.append(get(entry.record) or 0)
        if any(peaks):
            largest[blocks] = max(peaks)
    return largest


def _blocks_text(blocks: Blocks) -> str:
    """Return the setting as the option is written: ``null``, ``2`` or ``[4, 2]``."""
    if not blocks:
        return "null"
    if len(blocks) == 1:
        return str(blocks[0])
    return str(list(blocks))


def _good_cells(cells: CellsByBlocks, blocks: Blocks) -> list[Entry]:
    """Return the cells with checkpoints at ``blocks`` that ended well."""
    return [cell for cell in cells.get(blocks, ()) if cell.status == "ok"]


def _cost_text(cells: CellsByBlocks, best: Blocks) -> str:
    """Return how much longer a step takes with the ``best`` checkpoints than without; empty if it is unknown."""
    no_checkpoints: Blocks = ()
    if best == no_checkpoints:
        return ""
    cells_without = _good_cells(cells, no_checkpoints)
    cells_with = _good_cells(cells, best)
    if not cells_without or not cells_with:
        return ""
    try:
        ratio = compare(cells_without, cells_with).step.interval
    except (RecordError, UsageError):
        return ""
    if ratio is None:
        return ""
    interval = f"[{ratio.low:.3f}, {ratio.high:.3f}]"
    return f"; a step takes {ratio.ratio:.3f} {interval} times as long as without checkpoints (null)"
