"""The options of a sweep, and its cells: their names, their calls, their order, and which of them this process runs.

Values of options stay text as written, because the cells' parser reads them. This module is pure.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, TypeVar, get_args

from lm_profiler.record.calls import check_folder_name, command_line, config_file
from lm_profiler.record.run_record import Verb
from lm_profiler.record.sweep_files import Cell, SweepPlan
from lm_profiler.usage_error import UsageError, expect, expect_one_of

Item = TypeVar("Item")

MOST_CELLS = 10_000  # the most cells of a sweep; more are a mistake in the grid
CONFIGS = "configs"  # the folder within the sweep's folder for copies of its config files

_LONGEST_ID = 100  # Most characters of a cell's name. File systems allow 255, but people read it in tables.
_OPTION = re.compile(r"[A-Za-z_][\w.+-]*")


class SweepPart(NamedTuple):
    """The ``number``-th of ``of`` parts, counted from 1."""

    number: int
    of: int

    def among(self, cells: Sequence[Item]) -> list[Item]:
        """Return every ``of``-th of all ``cells``: the same ones, whatever has run already."""
        return list(cells[self.number - 1 :: self.of])


def part_of(text: str) -> SweepPart:
    """Return the part of a sweep that ``text`` names, such as ``2/8``, or raise UsageError."""
    size = re.fullmatch(r"\s*(\d+)/(\d+)\s*", text)
    part = SweepPart(int(size[1]), int(size[2])) if size is not None else SweepPart(0, 0)
    expect(1 <= part.number <= part.of, "part", "a part such as 1/8, from the first to the last", text[:100])
    return part


@dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """Run every combination of some options, each in its own process, and keep the outcome of each.

    The same command runs the missing cells. A cell whose folder is removed is missing again.

    Args:
        file: YAML with any of these options, or the name of a sweep that comes with the package.
        config: Config of every cell, or the name of one that comes with the package, such as demo.
        grid: Values of an option, as in --grid.model.size small,medium; every combination is run. Values that are
            lists: [1,2],[3,4].
        list: Sets of options, as in "[{model.size: small}]"; each is run with every combination of the grid.
        options: Further options of every cell.
        verb: What the cells run; it can be swept too, as --grid.verb fit,validate.
        repeats: Runs of each cell, in rounds of random order.
        seed: Seed of that order.
        timeout_s: Longest time of a cell in seconds; no limit if not given.
        name: Name of the sweep; if not given, the file's.
        log_dir: Folder of all runs.
        devices: GPUs as in CUDA_VISIBLE_DEVICES, each with one cell at a time; [0,1],[2,3] are two pairs.
        part: Run a part of the cells, such as 2/8: in a job array, say, each task runs its own.
        dry_run: Print the cells' calls, one per line, and run none.
        format: terminal, or json, with progress on stderr.
        command: The whole call.
    """

    WORDS: ClassVar[str] = "file"
    FILE: ClassVar[str] = "file"
    SHIPPED: ClassVar[str] = "sweeps"

    # YAML with any of these options, or the name of a sweep that comes with the package
    file: str | None = field(default=None, compare=False)
    config: str | None = None
    grid: Mapping[str, Sequence[str]] = field(default_factory=dict)
    list: Sequence[Mapping[str, str]] = ()
    options: Sequence[str] = ()
    verb: Verb = "fit"
    repeats: int = 1
    seed: int = 0
    timeout_s: float | None = None
    name: str = ""
    log_dir: str = "logs"
    devices: Sequence[str] = ()
    part: str | None = field(default=None, compare=False)
    dry_run: bool = False
    format: Literal["terminal", "json"] = field(default="terminal", compare=False)
    command: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.name:
            of_config = f"{Path(config_file(self.config)).stem}_sweep" if self.config else "sweep"
            object.__setattr__(self, "name", Path(self.file).stem if self.file else of_config)
        object.__setattr__(self, "devices", [device.strip("[]").replace(" ", "") for device in self.devices])
        check_folder_name(self.name, self.log_dir)
        for name, least in (("repeats", 1), ("seed", 0), ("timeout_s", 1)):
            value = getattr(self, name)
            expect(value is None or least <= value < math.inf, name, f"{least} or more", value)
        self._check_swept()

    @property
    def folder(self) -> Path:
        return Path(self.log_dir, self.name)

    @property
    def configs(self) -> Sequence[str]:
        """All config files, including those that are swept."""
        swept = (*self.grid.get("config", ()), *(entry["config"] for entry in self.list if "config" in entry))
        return [*([self.config] if self.config is not None else []), *swept]

    def _check_swept(self) -> None:
        fixed = {option[2:].partition("=")[0] for option in self.options}
        listed = {name for entry in self.list for name in entry}
        if not self.grid and not self.list and self.repeats == 1:
            raise UsageError("grid: expected options to sweep, given none; add, say, --grid.model.size small,medium")
        for name in (*self.grid, *listed):
            if not _OPTION.fullmatch(name):
                raise UsageError(f"{name[:100]!r}: expected an option such as model.size, given another name")
            if name in ("name", "log_dir"):
                raise UsageError(f"{name}: expected an option of a run, given one that the sweep itself sets")
            if name in fixed or (name in self.grid and name in listed):
                raise UsageError(f"{name}: expected once, in grid, in list or for all cells, given twice")
        for verb in (*self.grid.get("verb", ()), *(entry["verb"] for entry in self.list if "verb" in entry)):
            expect_one_of(get_args(Verb), "verb", verb)
        for name, values in (*((f"grid.{name}", self.grid[name]) for name in self.grid), ("devices", self.devices)):
            if len(set(values)) < len(values):
                raise UsageError(f"{name}: expected each value once, given {', '.join(values)}")


# -- cells -------------------------------------------------------------------------------------------------------------


def plan_of(request: SweepRequest, texts: Mapping[str, str]) -> SweepPlan:
    """Return the plan of ``request``: cells in the order of the grid, the last option fastest, repeats side by side.

    ``texts`` are those of its config files, by path. Cells read the copies that the sweep keeps, so that all have the
    same config even if the file changes. A dry run keeps no copies and names the files themselves.
    """
    points = _points(request)
    kept = {} if request.dry_run else _kept_as(request.configs)
    called = {path: str(request.folder / CONFIGS / name) for path, name in kept.items()}
    cells = []
    for point, name in zip(points, _ids(points), strict=True):
        for repeat in range(request.repeats):
            cell = ",".join([name] * bool(name) + [f"r{repeat}"] * (request.repeats > 1))
            cells.append(Cell(id=cell, overrides=point, repeat=repeat, arguments=_call(request, point, called, cell)))
    configs = {name: texts[path] for path, name in kept.items()}
    read = [texts[path] for path in request.configs]
    return made_plan(request.name, request.command, read, configs, cells, request.verb, request.seed)


def made_plan(
    name: str,
    command: str,
    texts: Sequence[str],
    configs: Mapping[str, str],
    cells: Sequence[Cell],
    verb: Verb = "fit",
    seed: int = 0,
) -> SweepPlan:
    """Return a plan; ``texts`` are those of the config files, ``configs`` those of the copies that are kept."""
    digest = hashlib.sha256("".join(texts).encode()).hexdigest() if texts else None
    facts = {"name": name, "command": command, "verb": verb, "seed": seed, "config_sha256": digest}
    return SweepPlan.model_validate({**facts, "configs": configs, "cells": cells})


def _points(request: SweepRequest) -> list[dict[str, str]]:
    """Return the options of each cell, or raise UsageError where there are too many, or one twice."""
    count = request.repeats * max(len(request.list), 1) * math.prod(map(len, request.grid.values()))
    if count > MOST_CELLS:
        raise UsageError(
            f"grid: expected at most {MOST_CELLS:,} cells, given {count:,.0f}; take fewer values or repeats"
        )
    # product() varies the last option fastest.
    crossed = itertools.product(request.list or [{}], itertools.product(*request.grid.values()))
    points = [{**entry, **dict(zip(request.grid, values, strict=True))} for entry, values in crossed]
    for items, times in Counter(tuple(point.items()) for point in points).items():
        if times > 1:
            raise UsageError(f"list: expected each cell once, given twice {dict(items)}; run cells again with repeats")
    return points


def _kept_as(paths: Sequence[str]) -> dict[str, str]:
    """Return a file name for the copy of each config: its own name, with a number where two are the same."""
    stems = {path: Path(config_file(path)).stem for path in paths}
    count = Counter(stem.lower() for stem in stems.values())
    return {path: f"{stem}{f'-{n}' * (count[stem.lower()] > 1)}.yaml" for n, (path, stem) in enumerate(stems.items())}


def run_order(plan: SweepPlan) -> list[Cell]:
    """Return the cells in the order in which they run: each repeat is a pass over all cells in a random order.

    So a drift during the sweep, such as a GPU that grows warm, does not affect only the last cells.
    """
    draw = random.Random(plan.seed)
    return sorted(plan.cells, key=lambda cell: (cell.repeat, draw.random()))


def shell_line(cell: Cell) -> str:
    """Return the cell's call as one line for a shell."""
    return command_line(cell.arguments).replace("\n", "'$'\\n''")  # a newline within single quotes


def _call(request: SweepRequest, point: Mapping[str, str], called: Mapping[str, str], cell_id: str) -> list[str]:
    # A config file overrides the options before it, so a swept config has to come first.
    options = [item for item in point.items() if item[0] != "verb"]
    swept = sorted(options, key=lambda item: item[0] != "config")
    return [
        point.get("verb", request.verb),
        *([f"--config={called.get(request.config, request.config)}"] if request.config is not None else []),
        *(f"--{name}={called.get(value, value) if name == 'config' else value}" for name, value in swept),
        *request.options,
        f"--log_dir={request.folder}",
        f"--name={cell_id}",
    ]


# -- names -------------------------------------------------------------------------------------------------------------


def _ids(points: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a name for each point that any file system accepts: ``size=small,precision=bf16-mixed``."""
    options = dict.fromkeys(option for point in points for option in point)
    told = [option for option in options if len(points) == 1 or len({point.get(option) for point in points}) > 1]
    labels = _labels(told)
    ids = [
        ",".join(f"{labels[option]}={_plain(value) or 'empty'}" for option, value in point.items() if option in told)
        for point in points
    ]
    count = Counter(name.lower() for name in ids)  # some file systems do not distinguish a from A
    return [
        name if len(name) <= _LONGEST_ID and count[name.lower()] == 1 else _with_digest(name, point)
        for point, name in zip(points, ids, strict=True)
    ]


def safe_name(text: str, options: Mapping[str, str]) -> str:
    """Return ``text`` as a name that any file system accepts, with a digest of ``options`` if it had to change."""
    plain = re.sub(r"[^A-Za-z0-9._+=,-]+", "-", text)
    return text if plain == text.lower() and len(text) <= _LONGEST_ID else _with_digest(plain, options)


def _with_digest(name: str, options: Mapping[str, str]) -> str:
    digest = hashlib.sha256(repr(list(options.items())).encode()).hexdigest()[:8]
    return f"{name[: _LONGEST_ID - 9]}-{digest}"


def _plain(value: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", value).strip("-")


def _labels(options: Iterable[str]) -> dict[str, str]:
    """Return for each option the last word of its path where no other option has it, else the whole path."""
    ends = {option: option.rpartition(".")[2] for option in options}
    count = Counter(ends.values())
    return {option: end if count[end] == 1 else option for option, end in ends.items()}
