"""Make the cells of a sweep: their names, their calls and their order. This module is pure."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lm_profiler.models.config import PRESETS
from lm_profiler.record.calls import command_line, config_file
from lm_profiler.record.sweep import Cell, SweepPlan
from lm_profiler.sweep.request import Request
from lm_profiler.usage_error import UsageError

MOST_CELLS = 10_000  # the most cells of a sweep; more are a mistake in the grid

CONFIGS = "configs"  # the folder within the sweep's folder for copies of its config files

_LONGEST_ID = 100  # The most characters of a cell's name. File systems allow 255, but people read it in tables.
_DIGEST = "-01234567"


def plan_of(request: Request, texts: Mapping[str, str]) -> SweepPlan:
    """Return the plan of ``request``: cells in the order of the grid, the last option fastest, repeats side by side.

    Args:
        request: The options of the sweep. Cells read the copies of config files that the sweep keeps, so that all cells
            have the same config even if the file changes. A dry run keeps no copies and names the files themselves.
        texts: The texts of its config files, by path.

    Raises:
        UsageError: a cell is listed twice, or there are more than ``MOST_CELLS``.
    """
    _check_count(request)
    points = _points(request)
    for items, count in Counter(tuple(point.items()) for point in points).items():
        if count > 1:
            raise UsageError(f"list: expected each cell once, given twice {dict(items)}; run cells again with repeats")
    folder = request.folder
    kept = {} if request.dry_run else _kept_as(request.configs)
    called = {path: str(folder / CONFIGS / name) for path, name in kept.items()}
    cells = []
    for point, name in zip(points, _ids(points), strict=True):
        for repeat in range(request.repeats):
            cell = ",".join([name] * bool(name) + [f"r{repeat}"] * (request.repeats > 1))
            call = _call(request, point, called, folder, cell)
            cells.append(Cell(id=cell, overrides=point, repeat=repeat, arguments=call))
    configs = "".join(texts[path] for path in request.configs).encode()
    return SweepPlan(
        name=request.name,
        command=request.command,
        verb=request.verb,
        seed=request.seed,
        config_sha256=hashlib.sha256(configs).hexdigest() if request.configs else None,
        configs={name: texts[path] for path, name in kept.items()},
        cells=cells,
    )


def _check_count(request: Request) -> None:
    count = request.repeats * max(len(request.list), 1) * math.prod(map(len, request.grid.values()))
    if count > MOST_CELLS:
        raise UsageError(
            f"grid: expected at most {MOST_CELLS:,} cells, given {count:,.0f}; take fewer values or repeats"
        )


def _kept_as(paths: Sequence[str]) -> dict[str, str]:
    """Return a file name for the copy of each config: its own name, with a number where two are the same."""
    stems = {path: Path(config_file(path)).stem for path in paths}
    count = Counter(stem.lower() for stem in stems.values())
    return {path: f"{stem}{f'-{n}' * (count[stem.lower()] > 1)}.yaml" for n, (path, stem) in enumerate(stems.items())}


def run_order(plan: SweepPlan) -> list[Cell]:
    """Return the cells in the order in which they run: each repeat is a pass over all cells in a random order.

    So a drift during the sweep, such as a GPU that grows warm, does not fall on the last cells alone.
    """
    draw = random.Random(plan.seed)
    return sorted(plan.cells, key=lambda cell: (cell.repeat, draw.random()))


def shell_line(cell: Cell) -> str:
    """Return the cell's call as one line for a shell."""
    return command_line(cell.arguments).replace("\n", "'$'\\n''")  # a newline within single quotes


def _points(request: Request) -> list[dict[str, str]]:
    # product() varies the last option fastest.
    crossed = itertools.product(request.list or [{}], itertools.product(*request.grid.values()))
    return [{**entry, **dict(zip(request.grid, values, strict=True))} for entry, values in crossed]


def _call(
    request: Request, point: Mapping[str, str], called: Mapping[str, str], folder: Path, cell_id: str
) -> list[str]:
    # A config file overrides the options before it, so a swept config has to come first.
    options = [item for item in point.items() if item[0] != "verb"]
    swept = sorted(options, key=lambda item: item[0] != "config")
    return [
        point.get("verb", request.verb),
        *([f"--config={called.get(request.config, request.config)}"] if request.config is not None else []),
        *(f"--{name}={called.get(value, value) if name == 'config' else value}" for name, value in swept),
        *request.options,
        f"--log_dir={folder}",
        f"--name={cell_id}",
    ]


def telling(points: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the options that distinguish points: not those with one value, nor those that the size implies."""
    options = dict.fromkeys(option for point in points for option in point)
    if len(points) == 1:
        return list(options)
    differ = [option for option in options if len({point.get(option) for point in points}) > 1]
    return [option for option in differ if not all(_restates(point, option) for point in points)]


def _restates(point: Mapping[str, str], option: str) -> bool:
    """Whether the point sets the value that its preset has anyway, or sets none."""
    config = PRESETS.get(point.get("model.size", ""))
    top, _, name = option.partition(".")
    return option not in point or (
        config is not None and top == "model" and point[option] == str(getattr(config, name, None))
    )


def _ids(points: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a name for each point that any file system accepts: ``size=small,precision=bf16-mixed``."""
    told = telling(points)
    labels = labels_of(told)
    ids = [_joined(labels, told, point) for point in points]
    count = Counter(name.lower() for name in ids)  # some file systems do not tell a from A
    return [
        f"{name[: _LONGEST_ID - len(_DIGEST)]}-{_digest(point)}"
        if len(name) > _LONGEST_ID or count[name.lower()] > 1
        else name
        for point, name in zip(points, ids, strict=True)
    ]


def _joined(labels: Mapping[str, str], told: Sequence[str], point: Mapping[str, str]) -> str:
    """Return ``label=value`` of each option; where that is too long, values are cut, not labels."""
    given = [(labels[option], _plain(value)) for option, value in point.items() if option in told]
    name = ",".join(f"{label}={value}" for label, value in given)
    if len(name) <= _LONGEST_ID or not given:
        return name
    room = (_LONGEST_ID - len(_DIGEST) - sum(len(label) + 2 for label, _ in given)) // len(given)
    return ",".join(f"{label}={value[: max(room, 4)]}" for label, value in given)


def labels_of(options: Iterable[str]) -> dict[str, str]:
    """Return for each option the shortest end of its path that no other option has."""
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
