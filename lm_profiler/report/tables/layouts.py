"""Layouts of tables: pivots, and layouts of published reports with their column names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from lm_profiler.analysis.steps.summaries import Steps, steps_after
from lm_profiler.models.config import DIMENSIONS
from lm_profiler.record.entry import Cut, Entry
from lm_profiler.record.quantities import TIMES
from lm_profiler.record.run_record import TimeSummary
from lm_profiler.record.steps import StepRow
from lm_profiler.report.tables import rows as merged
from lm_profiler.report.tables.rows import Merged, by_facts, fact_cell, heading, naming
from lm_profiler.report.tables.table import Heading, Table, TableCell, fact_text
from lm_profiler.report.tables.table_columns import COLUMNS, Column, column, parameters, preset_of

_STEP = TIMES["step"]


def pivot(entries: Sequence[Entry], down: Sequence[Column], across: Sequence[Column], value: Column) -> Table:
    """Return ``value`` by the facts ``down`` and ``across``, or a word for why there is none."""
    rows, columns = by_facts(entries, down), by_facts(entries, across)
    cells = by_facts(entries, [*down, *across])
    titles = [" ".join(fact_text(merged.fact(group, of)) for of in across) or "unknown" for group in columns.values()]
    named = [heading(of, list(rows.values())) for of in down]
    taken = [*(of.name for of in named), *titles]  # facts of different types may look the same: those have numbers
    titles = [t if taken.index(t) == at else f"{t} ({at})" for at, t in enumerate(titles, len(named))]
    headings = [*named, *(Heading(title, title, figures=True) for title in titles)]
    body = [
        [*(fact_cell(group, of) for of in down), *(value_cell(cells.get((*row, *key), ()), value) for key in columns)]
        for row, group in rows.items()
    ]
    how = ": mean [95 % interval]" * any(cell.low is not None for row in body for cell in row)
    if any(len(group) > 1 for group in cells.values()):
        how = f": {merged.HOW_MERGED}"
    return Table(headings, body, [heading(value, []).title + how], merged.notes(list(cells.values()), [*down, *across]))


def value_cell(group: Merged, value: Column, interval: bool = True) -> TableCell:
    """Return the figure of ``group``, with the number of its runs if there are several, or a word for how it ended."""
    if not group:
        return TableCell()
    if value.quantity is None:
        return fact_cell(group, value)
    good = [entry for entry in group if entry.status == "ok"]
    ran = [entry for entry in group if entry.status != "not run"]
    if not good:
        word = merged.distinct(entry.status for entry in (ran or group))[0]
        return TableCell(text=merged.WORDS.get(word, word), status=merged.status(ran or group))
    typical = merged.cell(good, value, interval)
    n = f" n={len(good)}" if len(good) > 1 else ""
    failed = [entry for entry in ran if entry.status != "ok"]
    return replace(typical, text=typical.text + n + (f" ({merged.how_many(failed)})" if failed else ""))


_OF_MODEL = ("size", *DIMENSIONS, "parameters")


def model_name(entry: Entry) -> str:
    """Return the size with the dimensions that are not the preset's, or the run's name for a module without sizes."""
    size = COLUMNS["size"].get(entry)
    if size is None:
        return entry.name
    given = {name: COLUMNS[name].get(entry) for name in DIMENSIONS}
    own = [f"{name} {value}" for name, value in given.items() if value != getattr(preset_of(size), name, None)]
    return f"{size} ({', '.join(own)})" if own else str(size)


def _telling(entries: Sequence[Entry]) -> list[Column]:
    """Return the facts that distinguish ``entries``, except facts about the outcome."""
    return [of for of in merged.apart_by(merged.alone(entries)) if of.group != COLUMNS["steadiness"].group]


def names(entries: Sequence[Entry]) -> list[str]:
    """Return a name for each entry: its model, the other facts that distinguish it, and its run if they do not."""
    apart = [of for of in _telling(entries) if of.name not in _OF_MODEL]
    facts = ([merged.told(of, of.get(entry)) for of in apart] for entry in entries)
    labels = [", ".join(filter(None, [model_name(of), *told])) for of, told in zip(entries, facts, strict=True)]
    alike = Counter(labels)
    told = zip(labels, entries, strict=True)
    return [f"{name}, {of.name}" if alike[name] > 1 and name != of.name else name for name, of in told]


def device_names(entries: Sequence[Entry]) -> dict[str | None, str]:
    """Return the type of each device, such as ``cuda``, or its name where several are of one type."""
    of = COLUMNS["device"]
    types = {of.get(entry): entry.environment.device_type if entry.environment else "unknown" for entry in entries}
    kinds = list(types.values())
    return {name: kind if kinds.count(kind) == 1 or name is None else name for name, kind in types.items()}


CellOf = Callable[[Entry], TableCell]
_HELD = {
    "model mem": "held_start_bytes",
    "model+fwd mem": "held_forward_bytes",
    "model+fwd+back mem": "held_backward_bytes",
    "fwd mem": "saved_bytes",
    "back mem": "backward_added_bytes",
}
_PASSES = {"forward": "fwd", "backward": "back", "forward_backward": "fwd & back"}
_DTYPES = {"64-true": "float64", "32-true": "float32", "16-true": "float16", "bf16-true": "bfloat16"}
_WORDS = ("device", "compile", "model", "dtype", "status")  # columns of words
_OF_WIDE = (*_OF_MODEL, "device", "batch_size", "compile", "context_length", "precision", "warmup_steps")


def wide(entries: Sequence[Entry]) -> Table:
    """Return a wide row for each run: means and standard deviations in seconds; memory as well for attention alone."""
    # Repeats have separate rows, and so do training, the forward pass alone, and each cut of the steps.
    each = merged.alone(entries)
    types = device_names(entries)
    # Attention alone has a width and no size.
    alone = all(COLUMNS["size"].get(of) is None and COLUMNS["d_model"].get(of) is not None for of in entries)
    told = [of for of in _telling(entries) if of.name not in (*_OF_WIDE, *["attention"] * alone)]
    cut = ["warmup_steps", "benchmark_steps"] * any(entry.cut is not None for entry in entries)
    repeat = ["repeat"] * any(entry.cell is not None and entry.cell.repeat for entry in entries)
    statistics = [(name, part, of) for part, name in _PASSES.items() for of in ("avg", "std")]
    seconds = {f"{name} {of} (sec)": f"{part}{'_std' * (of == 'std')}_s" for name, part, of in statistics}
    columns: dict[str, CellOf] = {
        "device": lambda entry: _word(types[COLUMNS["device"].get(entry)]),
        "batch_size": _fact("batch_size"),
        "compile": lambda entry: _word(COLUMNS["compile"].get(entry)),  # as a frame prints it: True, not true
        "model": lambda entry: _word(fact_text(COLUMNS["attention"].get(entry)) if alone else model_name(entry)),
        **{name: _fact(name) for name in [*["d_model"] * alone, "context_length"]},
        "dtype": lambda entry: _word(_DTYPES.get(given := COLUMNS["precision"].get(entry), given)),
        **{name: _fact(name) for name in [*(of.name for of in told), *cut]},
        **{title: _figure(name, "{:.6g}".format) for title, name in seconds.items()},
        **({title: _figure(name, _mib) for title, name in _HELD.items()} if alone else {}),
        "status": lambda entry: TableCell(entry.status, merged.WORDS.get(entry.status, entry.status)),
        **{name: _fact(name) for name in repeat},
    }
    words = [*_WORDS, *(of.name for of in told if not heading(of, each).figures)]
    headings = [Heading(title, title, title not in words) for title in columns]
    body = [[cell_of(entry) for cell_of in columns.values()] for entry in entries]
    return Table(headings, body, below=merged.notes(each, merged.called(naming(each))))


def _word(value: object) -> TableCell:
    return TableCell(value, "" if value is None else str(value))


def _fact(name: str) -> CellOf:
    return lambda entry: fact_cell([entry], column(name))


def _figure(name: str, show: Callable[[float], str]) -> CellOf:
    def cell_of(entry: Entry) -> TableCell:
        # The forward pass alone is not a time of both passes.
        runs = not name.startswith("forward_backward") or COLUMNS["backward_s"].get(entry) is not None
        value = COLUMNS[name].get(entry) if runs else None
        return TableCell(value, "" if value is None else show(value))

    return cell_of


def _mib(count: float) -> str:
    return f"{count / 2**20:,.{1 if abs(count) >= 100 * 2**20 else 3}f} MiB"


_DEVICE_TIMES = {"forward": COLUMNS["forward_s"], "forward+backward": COLUMNS["forward_backward_s"]}


def devices(entries: Sequence[Entry]) -> Table:
    """Return sizes down and devices across: the mean forward pass, and forward with backward."""
    cut = ["warmup_steps"] * any(entry.cut is not None for entry in entries)
    down, device = [COLUMNS[name] for name in ("size", *DIMENSIONS, *cut)], COLUMNS["device"]
    rows, across = by_facts(entries, down), by_facts(entries, [device])
    cells = by_facts(entries, [*down, device])
    types = device_names(entries)
    kinds = [types[merged.fact(group, device)] for group in across.values()]
    titles = [kind.upper() if kind in ("cpu", "cuda", "mps", "xpu") else kind for kind in kinds]
    headings = [
        *(Heading(name, name, figures=name != "Size") for name in ("Size", *DIMENSIONS, *cut)),
        Heading("num_params", "num_params"),
        *(Heading(f"{title} {part}", f"{title} {part}", True) for title in titles for part in _DEVICE_TIMES),
    ]
    body = []
    for row, group in rows.items():
        of_device = [cells.get((*row, *key), ()) for key in across]
        times = (_milliseconds(runs, of) for runs in of_device for of in _DEVICE_TIMES.values())
        body.append([*(fact_cell(group, of) for of in down), _parameters(group), *times])
    groups = list(cells.values())
    shown = [*down, device]
    how = [merged.HOW_MERGED if any(len(group) > 1 for group in groups) else "means"]
    same = merged.same_in_all(groups, [*shown, COLUMNS["parameters"]])
    return Table(headings, body, same, [*how, *merged.notes(groups, shown)])


def _milliseconds(group: Merged, of: Column) -> TableCell:
    part = of.name.removesuffix("_s")
    runs = [entry for entry in group if _mode(entry) in _modes_with(part)]
    # Runs that do exactly that give its time. Others would mix in it: an optimizer makes the passes slower.
    shortest = min((_mode(entry) for entry in runs), key=list(MODES).index, default=None)
    timed = [entry for entry in runs if _mode(entry) == shortest]
    cell = value_cell(timed, of, interval=False)
    if cell.value is None:
        return cell
    std = COLUMNS[f"{part}_std_s"].get(timed[0]) if len(timed) == 1 else None
    return replace(cell, text=f"{_STEP.show(cell.value, unit=False, digits=1)}ms", std=std)


def _modes_with(part: str) -> list[str]:
    """Return the modes whose step has this part, that of the part alone first."""
    order = list(MODES)
    return order[order.index(part) :]


def _parameters(group: Merged) -> TableCell:
    counts = merged.distinct(parameters(entry, embedding=False) for entry in group)
    if len(counts) != 1:
        return TableCell()
    return TableCell(counts[0], f"{counts[0] / 1e6:.1f}M (without token embedding)")


# the extent of a run's step, by the part whose time is its figure
MODES = {"forward": "forward", "forward_backward": "forward + backward", "step": "full step"}
_NOT_OF_MODES = tuple(COLUMNS[name] for name in ("verb", "optimizer", "parameters"))


def modes(entries: Sequence[Entry]) -> Table:
    """Return sizes down and the modes of a step across: the mean of each ± the standard deviation of its steps."""
    each = merged.alone(entries)
    told = [of for of in _telling(entries) if of not in _NOT_OF_MODES]
    repeat = [COLUMNS["repeat"]] * any(entry.cell is not None and entry.cell.repeat for entry in entries)
    down = list(dict.fromkeys((COLUMNS["size"], COLUMNS["parameters"], *told, *repeat)))
    rows = list(by_facts(entries, down).values())
    headings = [heading(of, rows) for of in down]
    headings += [Heading(f"{part}_s", f"{title} ({_STEP.shown_unit})", True) for part, title in MODES.items()]
    body = [[*(fact_cell(group, of) for of in down), *(_mode_cell(group, part) for part in MODES)] for group in rows]
    above = ["mean ± standard deviation of the steps", *merged.same_in_all(rows, [*down, *_NOT_OF_MODES])]
    return Table(headings, body, above, merged.notes(each, merged.called(naming(each))))


def _mode(entry: Entry) -> str:
    if entry.verb != "fit":
        return "forward"
    return "forward_backward" if COLUMNS["optimizer"].get(entry) == "none" else "step"


def _mode_cell(group: Merged, part: str) -> TableCell:
    # A mode is timed by runs that do exactly that; if there are none, it is that part of a longer step.
    order = _modes_with(part)
    does = sorted((entry for entry in group if _mode(entry) in order), key=lambda entry: order.index(_mode(entry)))
    if not does:
        return TableCell()
    mean, std = (COLUMNS[f"{part}{which}_s"].get(does[0]) for which in ("", "_std"))
    if mean is None:
        return TableCell(text=merged.WORDS.get(does[0].status, does[0].status), status=does[0].status)
    shown = [_STEP.show(seconds, unit=False, digits=2) for seconds in (mean, std) if seconds is not None]
    others = f" (of {len(same)})" if (same := [of for of in does if _mode(of) == _mode(does[0])])[1:] else ""
    return TableCell(mean, " ± ".join(shown) + others, std=std)


_TITLES = {"forward": "Forward pass", "forward_backward": "Forward + Backward pass"}
_SUMMARY = ("Model", "Params", "Forward (s)", "Backward (s)")
_SHARED = ("device", "verb", "batch_size", "context_length", "precision")  # facts in a banner


def blocks(entries: Sequence[Entry]) -> Table:
    """Return a block of text for each entry, a banner for each cut of the steps, and a table that sums them up."""
    above: list[str] = []
    rows = []
    ordered = sorted(entries, key=lambda entry: merged.rank(COLUMNS["warmup_steps"].get(entry)))
    for cut, group in groupby(zip(ordered, names(ordered), strict=True), lambda pair: pair[0].cut):
        named = list(group)
        above += _banner([entry for entry, _ in named], cut)
        for entry, name in named:
            steps = steps_after(entry) if entry.shows_steps else None
            above += [*_block(entry, name, steps), ""]
            rows.append(_row(entry, name, steps))
    headings = [Heading(title, title, title == "Params") for title in _SUMMARY]
    return Table(headings, rows, above, verbatim=True)


def _banner(entries: Sequence[Entry], cut: Cut | None) -> list[str]:
    given = {} if cut is None else {"warm-up": cut.warmup, "steps": cut.steps}
    facts = [f"{title} {value}" for title, value in given.items() if value is not None]
    for of in map(COLUMNS.__getitem__, _SHARED):
        values = [of.get(entry) for entry in entries]
        if None not in values and len(merged.distinct(values)) == 1:
            facts.append(merged.told(of, values[0]))
    text = ", ".join(facts)
    rule = "=" * min(len(text), 80)
    return [rule, text, rule, ""]


def _block(entry: Entry, name: str, steps: Steps | None) -> list[str]:
    size = str(COLUMNS["size"].get(entry) or entry.name)
    params = fact_cell([entry], COLUMNS["parameters"]).text or "unknown"
    lines = [f"{size.upper()} MODEL{name[len(size) :]}", f"Parameters: {params}"]
    if entry.status != "ok":
        word = merged.WORDS.get(entry.status, entry.status)
        lines.append(f"{word}: {entry.reason}" if entry.reason else word)
    if steps is None:
        return lines
    for part, title in _TITLES.items():
        if part == "forward" or steps.times["backward"].max:
            lines += _pass(part, title, steps)
    forward_s, backward_s = steps.times["forward"].mean, steps.times["backward"].mean
    if backward_s:
        ratio = f" ({backward_s / forward_s:.2f}x forward)" if forward_s else ""
        lines.append(f"  Backward-only: {backward_s:.6f} seconds{ratio}")
    return lines


def _pass(part: str, title: str, steps: Steps) -> list[str]:
    before = _steps("Warm-up", "Warm-up", steps.left_out, part) if steps.left_out else []
    time = steps.times[part]
    cv = "" if time.cv is None else f" (CV: {time.cv:.2%})"
    mean = f"  Mean: {_mean_std(time, ' ± ')} seconds{cv}" if time.n else "  no steps left"
    return [f"{title}:", *before, *_steps("Measurement", "Step", steps.rows, part), mean]


def _steps(which: str, each: str, rows: Sequence[StepRow], part: str) -> list[str]:
    shown = (f"    {each} {number}: {row.time(part):.6f} seconds" for number, row in enumerate(rows, 1))
    return [f"  {which} steps:", *shown]


def _mean_std(time: TimeSummary, sign: str) -> str:
    return f"{time.mean:.6f}" + (f"{sign}{time.std:.6f}" if time.std is not None else "")


def _row(entry: Entry, name: str, steps: Steps | None) -> list[TableCell]:
    facts = [TableCell(name, name), fact_cell([entry], COLUMNS["parameters"])]
    if steps is None:
        return [*facts, *[TableCell(text=merged.WORDS.get(entry.status, entry.status), status=entry.status)] * 2]
    times = (steps.times[part] for part in ("forward", "backward"))
    cells = []
    for time in times:
        cells.append(TableCell(time.mean, _mean_std(time, "±"), std=time.std) if time.max else TableCell())
    return [*facts, *cells]


def warmups(entries: Sequence[Entry]) -> Table:
    """Return a row for each run, pass and warm-up: the mean seconds and their standard deviation."""
    titles = ("", "forward_only", "warmup_steps", "benchmark_steps", "avg", "std")
    runs: dict[Path, list[Entry]] = {}
    for entry in entries:
        runs.setdefault(entry.folder, []).append(entry)
    body = []
    for name, cuts in zip(names([cuts[0] for cuts in runs.values()]), runs.values(), strict=True):
        for part, occurs in {"forward": "forward_s", "forward_backward": "backward_s"}.items():
            for of in (cut for cut in cuts if COLUMNS[occurs].get(cut) is not None):
                setting, count = (COLUMNS[fact].get(of) for fact in ("warmup_steps", "benchmark_steps"))
                facts = [_word(fact) for fact in (name, part == "forward", setting, count)]
                seconds = [_figure(f"{part}{which}_s", "{:.6g}".format)(of) for which in ("", "_std")]
                body.append([*facts, *seconds])
    return Table([Heading(title or "model", title, at > 1) for at, title in enumerate(titles)], body)


LAYOUTS: dict[str, Callable[[Sequence[Entry]], Table]] = {
    "blocks": blocks,
    "wide": wide,
    "devices": devices,
    "modes": modes,
    "warmups": warmups,
}


def laid_out(entries: Sequence[Entry], layout: str) -> Table:
    """Return the table of ``entries`` in the ``layout``, smallest sizes first; cells of a sweep keep its order."""
    return LAYOUTS[layout](by_size(entries))


def by_size(entries: Sequence[Entry]) -> list[Entry]:
    """Return runs of different sizes from the smallest on: the names of their folders are in alphabetical order.

    The cells of one sweep stay in the order in which it names them.
    """
    sweeps = {entry.sweep for entry in entries}
    is_one_sweep = len(sweeps) == 1 and None not in sweeps
    if is_one_sweep:
        return list(entries)
    size = COLUMNS["size"]
    return sorted(entries, key=lambda entry: merged.rank(size.get(entry)))
