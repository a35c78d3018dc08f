"""Layouts of tables: pivots, and those of published reports with their names of columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lm_profiler.record.entry import Entry
from lm_profiler.record.quantities import TIMES
from lm_profiler.report.tables.merged import HOW_MERGED, WORDS, Merged, by_facts, distinct, fact, how_many, status
from lm_profiler.report.tables.rows import apart_by, called, cell, fact_cell, heading, naming, notes, same_in_all, told
from lm_profiler.report.tables.table import Heading, Table, TableCell, fact_text
from lm_profiler.report.tables.table_columns import COLUMNS, DIMENSIONS, Column, parameters, preset_of


def pivot(entries: Sequence[Entry], down: Sequence[Column], across: Sequence[Column], value: Column) -> Table:
    """Return ``value`` of the runs by the facts ``down`` and ``across``."""
    rows, columns = by_facts(entries, down), by_facts(entries, across)
    cells = by_facts(entries, [*down, *across])
    titles = [" ".join(fact_text(fact(group, of)) for of in across) or "unknown" for group in columns.values()]
    named = [heading(of, list(rows.values())) for of in down]
    taken = _apart([*(of.name for of in named), *titles])[len(named) :]
    headings = [*named, *(Heading(title, title, figures=True) for title in taken)]
    body = []
    for row, group in rows.items():
        values = (value_cell(cells.get((*row, *key), ()), value) for key in columns)
        body.append([*(fact_cell(group, of) for of in down), *values])
    shown = heading(value, []).title
    merged = any(len(group) > 1 for group in cells.values())
    above = [f"{shown}: {HOW_MERGED}" if merged else f"{shown}: mean [95 % interval]" if value.quantity else shown]
    return Table(headings, body, above, notes(list(cells.values()), [*down, *across]))


def value_cell(group: Merged, value: Column, interval: bool = True) -> TableCell:
    """Return the figure of ``group``, with the number of its runs if there are several, or a word for how it ended."""
    if not group:
        return TableCell()
    if value.quantity is None:
        return fact_cell(group, value)
    good = [entry for entry in group if entry.status == "ok"]
    ran = [entry for entry in group if entry.status != "not run"]
    if not good:
        word = distinct(entry.status for entry in (ran or group))[0]
        return TableCell(text=WORDS.get(word, word), status=status(ran or group))
    typical = cell(good, value, interval)
    n = f" n={len(good)}" if len(good) > 1 else ""
    failed = [entry for entry in ran if entry.status != "ok"]
    rest = f" ({how_many(failed)})" if failed else ""
    return replace(typical, text=typical.text + n + rest)


def _apart(titles: Sequence[str]) -> list[str]:
    return [title if titles.index(title) == at else f"{title} ({at})" for at, title in enumerate(titles)]


_OF_MODEL = ("size", *DIMENSIONS, "parameters")


def model_name(entry: Entry) -> str:
    """Return the size with the dimensions that are not the preset's, or the run's name for a module without sizes."""
    size = COLUMNS["size"].get(entry)
    if size is None:
        return entry.name
    given = {name: COLUMNS[name].get(entry) for name in DIMENSIONS}
    own = [f"{name} {value}" for name, value in given.items() if value != getattr(preset_of(size), name, None)]
    return f"{size} ({', '.join(own)})" if own else str(size)


def names(entries: Sequence[Entry]) -> list[str]:
    """Return a name for each entry: its model, the other facts that tell it apart, and its run if they do not."""
    apart = [of for of in apart_by([[entry] for entry in entries]) if of.name not in _OF_MODEL]
    labels = [
        ", ".join([model_name(entry), *filter(None, (told(of, of.get(entry)) for of in apart))]) for entry in entries
    ]
    alike = Counter(labels)
    return [
        f"{name}, {entry.name}" if alike[name] > 1 and name != entry.name else name
        for name, entry in zip(labels, entries, strict=True)
    ]


def wide(entries: Sequence[Entry]) -> Table:
    """Return a wide row for each run: means and standard deviations in seconds; memory as well for attention alone."""
    types = device_names(entries)
    # Attention alone has a width and no size.
    alone = all(COLUMNS["size"].get(of) is None and COLUMNS["d_model"].get(of) is not None for of in entries)
    verbs = ["verb"] * (len({entry.verb for entry in entries}) > 1)
    cut = ["warmup_steps", "benchmark_steps"] * any(entry.cut is not None for entry in entries)
    repeat = ["repeat"] * any(entry.cell is not None and entry.cell.repeat for entry in entries)
    body = []
    for entry in entries:
        row = _wide_facts(entry, types, alone) | _facts(entry, (*verbs, *cut)) | _wide_times(entry)
        row |= (_held(entry) if alone else {}) | {"status": TableCell(entry.status, entry.status)}
        body.append(row | _facts(entry, repeat))
    words = ("device", "compile", "model", "dtype", "verb", "status")
    headings = [Heading(title, title, title not in words) for title in body[0]]
    each = [[entry] for entry in entries]
    return Table(headings, [list(row.values()) for row in body], below=notes(each, called(naming(each))))


def _facts(entry: Entry, names: Sequence[str]) -> dict[str, TableCell]:
    return {name: fact_cell([entry], COLUMNS[name]) for name in names}


def _wide_facts(entry: Entry, types: Mapping[str | None, str], alone: bool) -> dict[str, TableCell]:
    device, compiled = types[COLUMNS["device"].get(entry)], COLUMNS["compile"].get(entry)
    model = fact_text(COLUMNS["attention"].get(entry)) if alone else model_name(entry)
    return {
        "device": TableCell(device, device),
        **_facts(entry, ["batch_size"]),
        "compile": TableCell(compiled, "" if compiled is None else str(compiled)),  # as a frame prints it
        "model": TableCell(model, model),
        **_facts(entry, [*["d_model"] * alone, "context_length"]),
        "dtype": fact_cell([entry], COLUMNS["precision"]),
    }


def _wide_times(entry: Entry) -> dict[str, TableCell]:
    parts = {"forward": "fwd", "backward": "back", "forward_backward": "fwd & back"}
    return {
        f"{title} {word} (sec)": six_figures(COLUMNS[f"{part}{statistic}_s"].get(entry))
        for part, title in parts.items()
        for statistic, word in (("", "avg"), ("_std", "std"))
    }


def _held(entry: Entry) -> dict[str, TableCell]:
    held = {title: COLUMNS[name].get(entry) for title, name in _HELD.items()}
    return {title: TableCell(n, "" if n is None else _mib(n)) for title, n in held.items()}


def _mib(count: float) -> str:
    return f"{count / 2**20:,.{1 if abs(count) >= 100 * 2**20 else 3}f} MiB"


_HELD = {
    "model mem": "held_start_bytes",
    "model+fwd mem": "held_forward_bytes",
    "model+fwd+back mem": "held_backward_bytes",
    "fwd mem": "saved_bytes",
    "back mem": "backward_added_bytes",
}


def six_figures(value: float | None) -> TableCell:
    """Return a cell of seconds with six significant digits, as pandas prints them."""
    return TableCell(value, "" if value is None else f"{value:.6g}")


def device_names(entries: Sequence[Entry]) -> dict[str | None, str]:
    """Return the type of each device, such as ``cuda``, or its name where several are of one type."""
    of = COLUMNS["device"]
    types = {of.get(entry): entry.environment.device_type if entry.environment else "unknown" for entry in entries}
    kinds = list(types.values())
    return {name: kind if kinds.count(kind) == 1 or name is None else name for name, kind in types.items()}


def devices(entries: Sequence[Entry]) -> Table:
    """Return sizes down and devices across: the mean forward pass, and forward with backward."""
    cut = ["warmup_steps"] * any(entry.cut is not None for entry in entries)
    down = [COLUMNS[name] for name in ("size", *DIMENSIONS, *cut)]
    rows, across = by_facts(entries, down), by_facts(entries, [COLUMNS["device"]])
    cells = by_facts(entries, [*down, COLUMNS["device"]])
    types = device_names(entries)
    titles = [_short(types[fact(group, COLUMNS["device"])]) for group in across.values()]
    headings = [
        *(Heading(name, name, figures=name != "Size") for name in ("Size", *DIMENSIONS, *cut)),
        Heading("num_params", "num_params"),
        *(Heading(f"{title} {part}", f"{title} {part}", True) for title in titles for part in _DEVICE_TIMES),
    ]
    body = []
    for row, group in rows.items():
        of_device = (cells.get((*row, *key), ()) for key in across)
        times = (_milliseconds(runs, of) for runs in of_device for of in _DEVICE_TIMES.values())
        body.append([*(fact_cell(group, of) for of in down), _parameters(group), *times])
    groups = list(cells.values())
    shown = [*down, COLUMNS["device"]]
    how = [HOW_MERGED if any(len(group) > 1 for group in groups) else "means"]
    same = same_in_all(groups, [*shown, COLUMNS["parameters"]])
    return Table(headings, body, same, [*how, *notes(groups, shown)])


# how much of a step a run does, by the part whose time is its figure
MODES = {"forward": "forward", "forward_backward": "forward + backward", "step": "full step"}


def modes(entries: Sequence[Entry]) -> Table:
    """Return sizes down and the modes of a step across: the mean of each ± the standard deviation of its steps."""
    apart = apart_by([[entry] for entry in entries])
    told = [of for of in apart if of.group != COLUMNS["steadiness"].group and of not in _NOT_OF_MODES]
    repeat = ["repeat"] * any(entry.cell is not None and entry.cell.repeat for entry in entries)
    down = list(dict.fromkeys((COLUMNS["size"], COLUMNS["parameters"], *told, *(COLUMNS[name] for name in repeat))))
    rows = by_facts(entries, down)
    unit = TIMES["step"].shown_unit
    headings = [heading(of, list(rows.values())) for of in down]
    headings += [Heading(f"{part}_s", f"{title} ({unit})", True) for part, title in MODES.items()]
    body = [
        [*(fact_cell(group, of) for of in down), *(_mode_cell(group, part) for part in MODES)]
        for group in rows.values()
    ]
    above = ["mean ± standard deviation of the steps", *same_in_all(list(rows.values()), [*down, *_NOT_OF_MODES])]
    return Table(headings, body, above, notes([[entry] for entry in entries], called(naming([[e] for e in entries]))))


_NOT_OF_MODES = tuple(COLUMNS[name] for name in ("verb", "optimizer", "parameters"))


def _mode(entry: Entry) -> str:
    if entry.verb != "fit":
        return "forward"
    return "forward_backward" if COLUMNS["optimizer"].get(entry) == "none" else "step"


def _mode_cell(group: Merged, part: str) -> TableCell:
    order = list(MODES)[list(MODES).index(part) :]
    does = sorted((entry for entry in group if _mode(entry) in order), key=lambda entry: order.index(_mode(entry)))
    if not does:
        return TableCell()
    mean, std = (COLUMNS[f"{part}{which}_s"].get(does[0]) for which in ("", "_std"))
    if mean is None:
        return TableCell(text=WORDS.get(does[0].status, does[0].status), status=does[0].status)
    shown = [TIMES["step"].show(seconds, unit=False, digits=2) for seconds in (mean, std) if seconds is not None]
    others = f" (of {len(same)})" if (same := [of for of in does if _mode(of) == _mode(does[0])])[1:] else ""
    return TableCell(mean, " ± ".join(shown) + others)


_DEVICE_TIMES = {"forward": COLUMNS["forward_s"], "forward+backward": COLUMNS["forward_backward_s"]}


def _short(device: str) -> str:
    return device.upper() if device in ("cpu", "cuda", "mps", "xpu") else device


def _milliseconds(group: Merged, of: Column) -> TableCell:
    trained = [entry for entry in group if entry.verb == "fit"]
    alone = [entry for entry in group if entry.verb != "fit"]
    cell = value_cell((alone if of.name == "forward_s" else []) or trained, of, interval=False)
    if cell.value is None:
        return cell
    return replace(cell, text=f"{TIMES['step'].show(cell.value, unit=False, digits=1)}ms")


def _parameters(group: Merged) -> TableCell:
    counts = distinct(parameters(entry, embedding=False) for entry in group)
    if len(counts) != 1:
        return TableCell()
    return TableCell(counts[0], f"{counts[0] / 1e6:.1f}M (without token embedding)")
