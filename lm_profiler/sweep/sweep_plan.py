"""The cells of a sweep: their names, their calls and their order. Pure."""

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

MOST_CELLS = 10_000
CONFIGS = "configs"
"""In the sweep's folder: the config files that it began with."""

_LONGEST_ID = 100
"""Characters: file systems allow 255 a name, and people read it in tables."""
_DIGEST = "-01234567"


def plan_of(request: Request, texts: Mapping[str, str]) -> SweepPlan:
    """The plan of ``request``; cells in the order of the grid, the last option fastest, repeats beside each other.

    Args:
        request: What is asked for. Cells are called with the copies of config files that the sweep keeps, so that a
            file that changes meanwhile mixes nothing; in a dry run, which keeps none, with the files themselves.
        texts: What its config files hold, by their paths.

    Raises:
        UsageError: a cell is listed twice, or there are more than anybody waits for.
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
    """A file name for the copy of each config: its own where no other has it."""
    stems = {path: Path(config_file(path)).stem for path in paths}
    count = Counter(stem.lower() for stem in stems.values())
    return {path: f"{stem}{f'-{n}' * (count[stem.lower()] > 1)}.yaml" for n, (path, stem) in enumerate(stems.items())}


def run_order(plan: SweepPlan) -> list[Cell]:
    """The cells as they are run: each repeat is a pass over all of them, in an order of its own drawn from the seed.

    What changes while a sweep runs (a GPU that grows warm) then falls on all cells alike, not on the last ones.
    """
    draw = random.Random(plan.seed)
    return sorted(plan.cells, key=lambda cell: (cell.repeat, draw.random()))


def shell_line(cell: Cell) -> str:
    """The cell's call in one line, to be pasted into a shell."""
    return command_line(cell.arguments).replace("\n", "'$'\\n''")  # it stands in quotes


def _points(request: Request) -> list[dict[str, str]]:
    crossed = itertools.product(request.list or [{}], itertools.product(*request.grid.values()))
    return [{**entry, **dict(zip(request.grid, values, strict=True))} for entry, values in crossed]


def _call(
    request: Request, point: Mapping[str, str], called: Mapping[str, str], folder: Path, cell_id: str
) -> list[str]:
    # A later config file overrides the options before it: those that are swept come before other options.
    swept = sorted(point.items(), key=lambda item: item[0] != "config")
    return [
        request.verb,
        *([f"--config={called.get(request.config, request.config)}"] if request.config is not None else []),
        *(f"--{name}={called.get(value, value) if name == 'config' else value}" for name, value in swept),
        *request.options,
        f"--log_dir={folder}",
        f"--name={cell_id}",
    ]


def telling(points: Sequence[Mapping[str, str]]) -> list[str]:
    """The options that tell points apart, in their order: neither alike in all, nor what the size says by itself."""
    options = dict.fromkeys(option for point in points for option in point)
    if len(points) == 1:
        return list(options)
    differ = [option for option in options if len({point.get(option) for point in points}) > 1]
    return [option for option in differ if not all(_restates(point, option) for point in points)]


def _restates(point: Mapping[str, str], option: str) -> bool:
    """Whether a point gives its preset's own value, or none."""
    config = PRESETS.get(point.get("model.size", ""))
    top, _, name = option.partition(".")
    return option not in point or (
        config is not None and top == "model" and point[option] == str(getattr(config, name, None))
    )


def _ids(points: Sequence[Mapping[str, str]]) -> list[str]:
    """A name for each point, of letters that any file system takes: ``size=small,precision=bf16-mixed``."""
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
    """``label=value`` of each option; where that is too long, the values are cut and not the options."""
    given = [(labels[option], _plain(value)) for option, value in point.items() if option in told]
    name = ",".join(f"{label}={value}" for label, value in given)
    if len(name) <= _LONGEST_ID or not given:
        return name
    room = (_LONGEST_ID - len(_DIGEST) - sum(len(label) + 2 for label, _ in given)) // len(given)
    return ",".join(f"{label}={value[: max(room, 4)]}" for label, value in given)


def labels_of(options: Iterable[str]) -> dict[str, str]:
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
