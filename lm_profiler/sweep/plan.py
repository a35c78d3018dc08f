"""The cells of a sweep: their names, their calls and their order. Pure."""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lm_profiler.record.command import command_line
from lm_profiler.record.sweep import Cell, SweepPlan
from lm_profiler.sweep.request import Request

_LONGEST_ID = 100
"""Characters: file systems allow 255 a name, and people read it in tables."""


def plan_of(request: Request, command: str = "") -> SweepPlan:
    """The plan of ``request``; cells in the order of the grid, the last option fastest, repeats beside each other.

    Raises:
        OSError: a config file cannot be read.
        ValueError: a cell is listed twice.
    """
    points = [dict(point) for point in _points(request)]
    for items, count in Counter(tuple(point.items()) for point in points).items():
        if count > 1:
            raise ValueError(f"list: expected each cell once, given twice {dict(items)}; run cells again with repeats")
    folder = sweep_folder(request)
    cells = []
    for point, name in zip(points, _ids(points), strict=True):
        for repeat in range(request.repeats):
            parts = [name] * bool(name) + [f"r{repeat}"] * (request.repeats > 1)
            cell_id = ",".join(parts)
            cells.append(
                Cell(id=cell_id, overrides=point, repeat=repeat, arguments=_call(request, point, folder, cell_id))
            )
    configs = b"".join(Path(path).read_bytes() for path in request.configs)
    return SweepPlan(
        name=request.name,
        command=command,
        verb=request.verb,
        seed=request.seed,
        config_sha256=hashlib.sha256(configs).hexdigest() if request.configs else None,
        cells=cells,
    )


def sweep_folder(request: Request) -> Path:
    """Where all of it goes."""
    return Path(request.log_dir, request.name)


def run_order(plan: SweepPlan) -> list[Cell]:
    """The cells as they are run: each repeat is a pass over all of them, in an order of its own drawn from the seed.

    What changes while a sweep runs (a GPU that grows warm) then falls on all cells alike, not on the last ones.
    """
    draw, ordered = random.Random(plan.seed), []
    for repeat in sorted({cell.repeat for cell in plan.cells}):
        once = [cell for cell in plan.cells if cell.repeat == repeat]
        draw.shuffle(once)
        ordered += once
    return ordered


def shell_line(cell: Cell) -> str:
    """The cell's call in one line, to be pasted into a shell."""
    return command_line(cell.arguments).replace("\n", "'$'\\n''")  # it stands in quotes


def _points(request: Request) -> Iterable[Mapping[str, str]]:
    for entry in request.list or [{}]:
        for values in itertools.product(*request.grid.values()):
            yield {**entry, **dict(zip(request.grid, values, strict=True))}


def _call(request: Request, point: Mapping[str, str], folder: Path, cell_id: str) -> list[str]:
    # A later config file overrides the options before it: those that are swept come before other options.
    swept = sorted(point.items(), key=lambda item: item[0] != "config")
    return [
        request.verb,
        *([f"--config={request.config}"] if request.config is not None else []),
        *(f"--{option}={value}" for option, value in swept),
        *request.options,
        f"--log_dir={folder}",
        f"--name={cell_id}",
    ]


def _ids(points: Sequence[Mapping[str, str]]) -> list[str]:
    """A name for each point, of letters that any file system takes: ``size=small,precision=bf16-mixed``."""
    labels = _labels({option for point in points for option in point})
    ids = [",".join(f"{labels[option]}={_plain(value)}" for option, value in point.items()) for point in points]
    count = Counter(name.lower() for name in ids)  # some file systems do not tell a from A
    return [
        f"{name[: _LONGEST_ID - 9]}-{_digest(point)}" if len(name) > _LONGEST_ID or count[name.lower()] > 1 else name
        for point, name in zip(points, ids, strict=True)
    ]


def _labels(options: Iterable[str]) -> dict[str, str]:
    """The shortest end of each option's path that no other has."""
    paths = {option: option.split(".") for option in options}
    ends = Counter(".".join(path[-n:]) for path in paths.values() for n in range(1, len(path) + 1))
    return {
        option: next((end for n in range(1, len(path)) if ends[end := ".".join(path[-n:])] == 1), option)
        for option, path in paths.items()
    }


def _plain(value: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", value).strip("-") or "empty"


def _digest(point: Mapping[str, str]) -> str:
    return hashlib.sha256(repr(list(point.items())).encode()).hexdigest()[:8]
