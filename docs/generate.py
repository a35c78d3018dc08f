"""What the documentation says about the code, read from the code: figures, options, packages and who imports whom.

Run by `docs/conf.py` at each build. Nothing here is kept by hand.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from textwrap import fill

import grimp
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import ranks_picture
from schemas import schemas

from lm_profiler.analysis.conclude import FINDINGS
from lm_profiler.cli import main as program
from lm_profiler.record.improve_record import ImproveRecord
from lm_profiler.record.quantities import (
    FIGURES,
    LISTS,
    PLANNED_COLUMNS,
    REMEDY_COLUMNS,
    TRIED_COLUMNS,
    Quantity,
    overview,
)

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "lm_profiler"


def write_all(folder: Path) -> None:
    """Write every generated piece of the documentation into ``folder``."""
    folder.mkdir(exist_ok=True)
    for name, text in (
        ("figures.md", figures),
        ("columns.txt", columns),
        ("command_line.md", command_line),
    ):
        (folder / name).write_text(text(), encoding="utf-8")
    for name, table_columns in TABLES.items():
        (folder / f"{name}_columns.md").write_text(
            meanings(table_columns), encoding="utf-8"
        )
    for name, schema in schemas():
        (folder / name).write_text(
            json.dumps(schema, indent=1) + "\n", encoding="utf-8"
        )
    floors, imports = rooms(), imports_between_rooms()
    (folder / "rooms.md").write_text(rooms_table(floors, imports), encoding="utf-8")
    draw(floors, imports, folder / "rooms.svg")
    draw_way(folder / "way.svg")
    ranks_picture.draw(folder / "ranks.svg")


# -- figures ----------------------------------------------------------------------------------------------------------


def figures() -> str:
    """A section for each group of the registry, then one for each table within ``run.json``; then ``improve.json``."""
    head = ("name", "shown as", "meaning", "in its file", "TensorBoard")
    parts = [
        f"## {title}\n\n{table(head, _rows(of))}" for title, of in overview().items()
    ]
    parts += [
        f"## Rows of `{path}`\n\n{table(head, _rows(of))}" for path, of in LISTS.items()
    ]
    parts += [
        f"## {f'Rows of `{path}` in' if path else 'In'} `improve.json`\n\n{table(head, _rows(of))}"
        for path, of in FIGURES[ImproveRecord].items()
    ]
    return "\n".join(parts)


def _rows(quantities: Iterable[Quantity]) -> list[tuple[str, ...]]:
    def row(q: Quantity) -> tuple[str, ...]:
        tags = ", ".join(f"`{tag}`" for tag in (q.tag, q.run_tag) if tag)
        return (
            f"`{q.name}`",
            q.heading,
            q.meaning,
            f"`{q.path}`" if q.path else "",
            tags,
        )

    return list(map(row, quantities))


TABLES = {"plan": PLANNED_COLUMNS, "remedy": REMEDY_COLUMNS, "tried": TRIED_COLUMNS}
"""Tables of ``plan`` and ``improve``, whose columns their pages explain."""


def meanings(quantities: Iterable[Quantity]) -> str:
    return table(
        ("column", "what it is"), [(of.heading, of.meaning) for of in quantities]
    )


# -- the command line -------------------------------------------------------------------------------------------------


def columns() -> str:
    return said("report", "--columns", "help")


def command_line() -> str:
    """Each verb's own help, as its parser prints it."""
    return "\n".join(
        f"{'## ' + verb if verb else ''}\n\n{_help(verb)}" for verb in ("", *verbs())
    )


def verbs() -> dict[str, str]:
    return program.VERBS


def _help(verb: str) -> str:
    """Its help; of the Trainer's other verbs what differs from fit's."""
    text = said(
        *([verb] if verb else []),
        "--help",
        *(["all"] if verb in program.TRAINER_VERBS else []),
    )
    if verb not in program.TRAINER_VERBS or verb == "fit":
        return f"```text\n{text}```\n"
    own, fit = (
        set(re.findall(r"^ +(--[\w.]+)", page, re.MULTILINE))
        for page in (text, said("fit", "--help", "all"))
    )
    more = (
        f" Further options: {', '.join(f'`{option}`' for option in sorted(own - fit))}."
        if own - fit
        else ""
    )
    less = (
        f" It does not take {', '.join(f'`{option}`' for option in sorted(fit - own))}."
        if fit - own
        else ""
    )
    return f"{verbs()[verb].capitalize()}. Takes the options of `fit`.{more}{less}\n"


def said(*arguments: str) -> str:
    """What the program prints for ``arguments``, 100 columns wide."""
    width, out = os.environ.get("COLUMNS"), io.StringIO()
    os.environ["COLUMNS"] = "100"
    try:
        with redirect_stdout(out):
            try:
                code = program.main(arguments)
            except SystemExit as end:  # as argparse ends a call for help
                code = end.code
    finally:
        os.environ.pop("COLUMNS") if width is None else os.environ.update(COLUMNS=width)
    if code:
        raise RuntimeError(f"{' '.join(arguments)}: exit code {code}")
    return out.getvalue()


# -- the rooms --------------------------------------------------------------------------------------------------------


def rooms() -> list[list[str]]:
    """The packages of each layer, the highest first, from import-linter's settings."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        "tool"
    ]["importlinter"]
    (layers,) = (
        contract["layers"]
        for contract in settings["contracts"]
        if contract["type"] == "layers" and contract["containers"] == [PACKAGE]
    )
    floors = [re.split(r"\s*[|:]\s*", layer) for layer in layers]
    return [
        rooms
        for names in floors
        if (rooms := [name for name in names if _file(name).is_dir()])
    ]


def imports_between_rooms() -> Counter[tuple[str, str]]:
    """How many modules of one room import how many of another: ``(importer, imported)`` to their number."""
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    count = Counter[tuple[str, str]]()
    for module in graph.modules:
        for other in graph.find_modules_directly_imported_by(module):
            pair = _room(module), _room(other)
            count[pair] += all(pair) and pair[0] != pair[1]
    return +count


def _room(module: str) -> str:
    """The package below ours that holds ``module``; empty for a module of none."""
    name = module.split(".")[1] if "." in module else ""
    return name if name and _file(name).is_dir() else ""


def rooms_table(floors: list[list[str]], imports: Mapping[tuple[str, str], int]) -> str:
    """Each room and sub-room: where, what for (the docstring of its package), and what it imports."""
    rows = []
    for floor, names in enumerate(reversed(floors)):
        for name in names:
            below = (
                ", ".join(sorted(other for room, other in imports if room == name))
                or "nothing of ours"
            )
            rows += [(str(floor), f"**{name}**", _purpose(_file(name)), below)]
            rows += [
                ("", f"{name}/{folder.name}", _purpose(folder), "")
                for folder in _inner(name)
            ]
    return table(("layer", "package", "what it is for", "imports from"), rows)


def _file(room: str) -> Path:
    return ROOT / PACKAGE / room


def _inner(room: str) -> Iterator[Path]:
    return (path.parent for path in sorted(_file(room).glob("*/__init__.py")))


def _purpose(folder: Path) -> str:
    """The docstring of a package or a module, in one line."""
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split(
        "\n\nExample"
    )[0]
    return " ".join(text.split()).replace("``", "`")


def draw(
    floors: list[list[str]], imports: Mapping[tuple[str, str], int], file: Path
) -> None:
    """The rooms by floor, with an arrow for every pair of rooms of which one imports the other."""
    figure, axes = plt.subplots(figsize=(8.5, 1.25 * len(floors)), layout="constrained")
    places, half = {}, 0.48
    for y, names in enumerate(reversed(floors)):
        for at, name in enumerate(names):
            places[name] = ((at + 0.5) * 12 / len(names) + 0.5 * (-1) ** y, 2.0 * y)
    colours = {name: f"C{at % 10}" for at, name in enumerate(places)}
    for (above, below), count in imports.items():
        (x, y), (to, down) = places[above], places[below]
        arrow = FancyArrowPatch(
            (x + 0.06 * (to - x), y - half),
            (to + 0.06 * (x - to), down + half),
            color=colours[above],
            alpha=0.75,
            arrowstyle="-|>",
            mutation_scale=11,
            linewidth=0.7 + 0.12 * min(count, 20),
            connectionstyle="arc3,rad=0.05",
        )
        axes.add_patch(arrow)
    for name, (x, y) in places.items():
        box = FancyBboxPatch(
            (x - 1.6, y - half),
            3.2,
            2 * half,
            boxstyle="round,pad=0.02",
            facecolor="white",
            edgecolor=colours[name],
            linewidth=1.8,
            zorder=3,
        )
        axes.add_patch(box)
        inner = " ".join(folder.name for folder in _inner(name))
        axes.text(
            x,
            y + (0.17 if inner else 0),
            name,
            ha="center",
            va="center",
            fontsize=11,
            weight="bold",
            zorder=4,
        )
        axes.text(
            x,
            y - 0.2,
            inner,
            ha="center",
            va="center",
            fontsize=7.5,
            color="0.3",
            zorder=4,
        )
    axes.set(xlim=(-0.8, 12.8), ylim=(-0.6, 2.0 * len(floors) - 1.3))
    axes.axis("off")
    figure.savefig(file, facecolor="white")
    plt.close(figure)


WAY = (
    (
        "marks",
        "lm_profiler.callbacks.marks.phases:PhaseProfiler",
        "an instant on two clocks where a phase begins or ends",
    ),
    (
        "rows",
        "lm_profiler.callbacks.session:Session",
        "a row a step, on disk each second",
    ),
    (
        "collect",
        "lm_profiler.callbacks.collect:Collector",
        "asks Trainer, module, torch and machine; nothing else does",
    ),
    (
        "Evidence",
        "lm_profiler.analysis.evidence:Evidence",
        "plain data, kept in evidence.json.gz",
    ),
    ("conclude", "lm_profiler.analysis.conclude:conclude", ""),
    (
        "RunRecord",
        "lm_profiler.record.run_record:RunRecord",
        "every figure, in run.json",
    ),
    (
        "write_run",
        "lm_profiler.callbacks.run_files:write_run",
        "when the loop ends, and once with everything",
    ),
    (
        "show",
        "lm_profiler.report.run.run_page:end_tables",
        "terminal, tables, pictures, pages: from the record alone",
    ),
)
"""The way of a step through the code: what it is called, where that is, and what happens there."""


def draw_way(file: Path) -> None:
    """Draw the way of a step, from names that the code has.

    Raises:
        AttributeError: one of them is not there any more.
    """
    figure, axes = plt.subplots(figsize=(8.5, 0.82 * len(WAY)), layout="constrained")
    for at, (name, place, what) in enumerate(WAY):
        module, _, attribute = place.partition(":")
        getattr(import_module(module), attribute)
        y = -1.6 * at
        what = what or "a function a finding: " + ", ".join(
            title for title, _ in FINDINGS
        )
        box = FancyBboxPatch(
            (0, y - 0.45),
            3,
            0.9,
            boxstyle="round,pad=0.02",
            facecolor="white",
            edgecolor=f"C{at}",
        )
        axes.add_patch(box)
        axes.text(1.5, y, name, ha="center", va="center", fontsize=11, weight="bold")
        axes.text(
            3.3,
            y + 0.2,
            module.removeprefix(f"{PACKAGE}.") + f": {attribute}",
            va="center",
            fontsize=8.5,
            color="0.3",
        )
        axes.text(3.3, y + 0.12, fill(what, 92), va="top", fontsize=8.5)
        if at:
            arrow = FancyArrowPatch(
                (1.5, y + 1.15),
                (1.5, y + 0.45),
                arrowstyle="-|>",
                mutation_scale=12,
                color="0.3",
            )
            axes.add_patch(arrow)
    axes.set(xlim=(-0.2, 12.8), ylim=(-1.6 * len(WAY) + 0.8, 0.8))
    axes.axis("off")
    figure.savefig(file, facecolor="white")
    plt.close(figure)


def table(head: tuple[str, ...], rows: list[tuple[str | None, ...]]) -> str:
    """A Markdown table; a missing cell is empty."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join(
        f"| {' | '.join((cell or '').replace('|', chr(92) + '|') for cell in line)} |\n"
        for line in lines
    )
