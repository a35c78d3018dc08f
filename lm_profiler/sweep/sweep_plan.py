"""The options of a sweep, and its cells: their names, calls and order, and the part that this process runs.

Values of options stay the text that was written, because the parser of the cells reads them. This module is pure.
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
from typing import ClassVar, Literal, get_args

from lm_profiler.record.calls import check_folder_name, command_line, config_file
from lm_profiler.record.run_record import Verb
from lm_profiler.record.sweep_files import Cell, SweepPlan
from lm_profiler.usage_error import UsageError, expect, expect_one_of

MOST_CELLS = 10_000  # the limit for a sweep: a larger grid is probably a mistake
# the folder within the sweep's folder for copies of its config files
CONFIGS = "configs"

_LONGEST_ID = 100  # characters of a cell's name. File systems allow 255, but people read the names in tables.
_DIGEST_CHARACTERS = 8
_OPTION = re.compile(r"[A-Za-z_][\w.+-]*")


@dataclass(frozen=True)
class SweepPart:
    """The ``number``-th of ``count`` parts, counted from 1."""

    number: int
    count: int

    def cells_of(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return every ``count``-th of all ``cells``, independent of which cells have already run."""
        return list(cells[self.number - 1 :: self.count])


def part_of(text: str) -> SweepPart:
    """Return the part of a sweep that ``text`` names, such as ``2/8``, or raise UsageError."""
    match = re.fullmatch(r"\s*(\d+)/(\d+)\s*", text)
    part = SweepPart(number=0, count=0)
    if match is not None:
        part = SweepPart(int(match[1]), int(match[2]))
    expect(
        1 <= part.number <= part.count,
        "part",
        "a part such as 1/8, up to 8/8",
        text[:100],
    )
    return part


@dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """Run every combination of some options, each in its own process, and keep the outcome of each.

    The same command resumes a sweep: it runs the cells without an outcome. Remove a cell's folder to run it again.

    Args:
        file: YAML with any of these options, or the name of a sweep that comes with the package.
        config: Config of every cell, or the name of one that comes with the package, such as demo.
        grid: Values of an option, as in --grid.model.size small,medium; every combination is run. If values are lists,
            write [1,2],[3,4].
        list: Sets of options, as in "[{model.size: small}]"; each is run with every combination of the grid.
        options: Further options of every cell.
        verb: The verb that the cells run; it can be swept too, as in --grid.verb fit,validate.
        repeats: Number of runs of each cell. In each round, all cells run once, in random order.
        seed: Seed of this random order.
        timeout_s: Time limit of a cell in seconds; if not given, there is none.
        name: Name of the sweep; if not given, that of the file.
        log_dir: Folder of all runs.
        devices: GPUs as in CUDA_VISIBLE_DEVICES, each for one cell at a time; [0,1],[2,3] are two pairs of GPUs.
        part: Run a part of the cells, such as 2/8; in a job array, for example, each task runs its own part.
        dry_run: Print the command of each cell, and run none.
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
        """Fill in the name, write devices without brackets and spaces, and raise UsageError for a wrong value."""
        # the only way to set a field of a frozen dataclass
        if not self.name:
            object.__setattr__(self, "name", self._default_name())
        devices = [device.strip("[]").replace(" ", "") for device in self.devices]
        object.__setattr__(self, "devices", devices)

        check_folder_name(self.name, self.log_dir)
        for name, minimum in (("repeats", 1), ("seed", 0), ("timeout_s", 1)):
            value = getattr(self, name)
            is_in_range = value is None or minimum <= value < math.inf
            expect(is_in_range, name, f"{minimum} or more", value)
        self._check_swept_options()
        for verb in self._swept_values("verb"):
            expect_one_of(get_args(Verb), "verb", verb)
        for name, values in self.grid.items():
            _check_distinct(f"grid.{name}", values)
        _check_distinct("devices", self.devices)

    def _default_name(self) -> str:
        """Return the name of the sweep if the user gives none: after its file, else its config."""
        if self.file:
            return Path(self.file).stem
        if self.config:
            return f"{Path(config_file(self.config)).stem}_sweep"
        return "sweep"

    @property
    def folder(self) -> Path:
        return Path(self.log_dir, self.name)

    @property
    def configs(self) -> Sequence[str]:
        """All config files, including those that are swept."""
        swept = self._swept_values("config")
        if self.config is None:
            return swept
        return [self.config, *swept]

    def _swept_values(self, option: str) -> Sequence[str]:
        """Return the values of an option in the grid, then in the list."""
        values = list(self.grid.get(option, ()))
        for entry in self.list:
            if option in entry:
                values.append(entry[option])
        return values

    def _check_swept_options(self) -> None:
        """Raise UsageError unless something is swept, and each swept option is one of a run and is set only once."""
        if not self.grid and not self.list and self.repeats == 1:
            raise UsageError(
                "grid: expected options to sweep, given none; add for example --grid.model.size small,medium"
            )
        in_options: set[str] = set()
        for option in self.options:
            name, _, _ = option[2:].partition("=")  # of ``--name=value``
            in_options.add(name)
        in_list: set[str] = set()
        for entry in self.list:
            in_list.update(entry)
        swept_options = [*self.grid, *sorted(in_list)]
        for name in swept_options:
            if not _OPTION.fullmatch(name):
                raise UsageError(
                    f"{name[:100]!r}: is not the name of an option; give for example model.size"
                )
            if name in ("name", "log_dir"):
                raise UsageError(
                    f"{name}: expected an option of a run, given one that the sweep itself sets"
                )
            in_grid_and_list = name in self.grid and name in in_list
            if name in in_options or in_grid_and_list:
                raise UsageError(
                    f"{name}: expected in one place (grid, list or the options of all cells), given in two"
                )


def _check_distinct(name: str, values: Sequence[str]) -> None:
    if len(set(values)) < len(values):
        raise UsageError(f"{name}: expected each value once, given {', '.join(values)}")


# -- cells -------------------------------------------------------------------------------------------------------------


def plan_of(request: SweepRequest, texts: Mapping[str, str]) -> SweepPlan:
    """Return the plan of ``request``. Its cells are in the order of the grid, in which the last option varies fastest.

    ``texts`` has the text of each config file by its path. Cells read copies of these files in the sweep's folder, so
    that all have the same config even if a file changes. A dry run makes no copies, and its cells name the files.
    """
    points = _options_of_cells(request)
    copy_names: dict[str, str] = {}
    if not request.dry_run:
        copy_names = _copy_names(request.configs)
    copies = {
        path: str(request.folder / CONFIGS / name) for path, name in copy_names.items()
    }
    cells = []
    for point, point_name in zip(points, _point_names(points), strict=True):
        for repeat in range(request.repeats):
            cell_id = _cell_id(point_name, repeat, request.repeats)
            arguments = _arguments_of_cell(request, point, copies, cell_id)
            cells.append(
                Cell(id=cell_id, overrides=point, repeat=repeat, arguments=arguments)
            )
    return made_plan(
        request.name,
        request.command,
        texts=[texts[path] for path in request.configs],
        configs={name: texts[path] for path, name in copy_names.items()},
        cells=cells,
        verb=request.verb,
        seed=request.seed,
    )


def _cell_id(point_name: str, repeat: int, repeats: int) -> str:
    """Return the name of the point, if it has one, and the number of the repeat, if there are several."""
    words = []
    if point_name:
        words.append(point_name)
    if repeats > 1:
        words.append(f"r{repeat}")
    return ",".join(words)


def made_plan(
    name: str,
    command: str,
    texts: Sequence[str],
    configs: Mapping[str, str],
    cells: Sequence[Cell],
    verb: Verb = "fit",
    seed: int = 0,
) -> SweepPlan:
    """Return a plan; ``texts`` are the texts of the config files, ``configs`` those of their copies by file name."""
    digest = None
    if texts:
        digest = hashlib.sha256("".join(texts).encode()).hexdigest()
    return SweepPlan(
        name=name,
        command=command,
        verb=verb,
        seed=seed,
        config_sha256=digest,
        configs=dict(configs),
        cells=list(cells),
    )


def _options_of_cells(request: SweepRequest) -> list[dict[str, str]]:
    """Return the options of each cell; raise UsageError if there are too many cells, or two equal ones."""
    entries = request.list or [{}]
    grid_points = math.prod(len(values) for values in request.grid.values())
    count = request.repeats * len(entries) * grid_points
    if count > MOST_CELLS:
        raise UsageError(
            f"grid: expected at most {MOST_CELLS:,} cells, given {count:,.0f}; take fewer values or repeats"
        )
    points: list[dict[str, str]] = []
    for entry in entries:
        for values in itertools.product(*request.grid.values()):
            # ``product`` varies the last option fastest.
            point = dict(entry)
            point.update(zip(request.grid, values, strict=True))
            points.append(point)

    counts = Counter(tuple(point.items()) for point in points)
    for items, times in counts.items():
        if times > 1:
            raise UsageError(
                f"list: expected each cell once, given {dict(items)} twice; use repeats to run cells again"
            )
    return points


def _copy_names(paths: Sequence[str]) -> dict[str, str]:
    """Return a file name for the copy of each config: its own name, with a number if two have the same name."""
    stems = {path: Path(config_file(path)).stem for path in paths}
    uses = Counter(stem.lower() for stem in stems.values())
    names = {}
    for number, (path, stem) in enumerate(stems.items()):
        is_unique = uses[stem.lower()] == 1
        if not is_unique:
            stem = f"{stem}-{number}"
        names[path] = f"{stem}.yaml"
    return names


def run_order(plan: SweepPlan) -> list[Cell]:
    """Return the cells in the order in which they run: each repeat is a round over all cells in a random order.

    So a drift during the sweep, such as a GPU that gets warm, does not affect only the cells at the end of the grid.
    """
    draw = random.Random(plan.seed)
    return sorted(plan.cells, key=lambda cell: (cell.repeat, draw.random()))


def shell_line(cell: Cell) -> str:
    """Return the cell's call as one line for a shell."""
    # a newline within single quotes
    return command_line(cell.arguments).replace("\n", "'$'\\n''")


def _arguments_of_cell(
    request: SweepRequest,
    point: Mapping[str, str],
    copies: Mapping[str, str],
    cell_id: str,
) -> list[str]:
    """Return the words of a cell's call; ``copies`` has the path of the copy of each config by the config's path."""
    arguments = [point.get("verb", request.verb)]
    # A config file overrides the options before it, so configs come first.
    for config in (request.config, point.get("config")):
        if config is not None:
            arguments.append(f"--config={copies.get(config, config)}")
    for name, value in point.items():
        if name not in ("verb", "config"):
            arguments.append(f"--{name}={value}")
    arguments += request.options
    arguments += [f"--log_dir={request.folder}", f"--name={cell_id}"]
    return arguments


# -- names -------------------------------------------------------------------------------------------------------------


def _point_names(points: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a name for each point that is valid on any file system: ``size=small,precision=bf16-mixed``."""
    labels = _labels(_distinguishing_options(points))
    names = []
    for point in points:
        words = []
        for option, value in point.items():
            if option in labels:
                plain_value = _plain(value) or "empty"
                words.append(f"{labels[option]}={plain_value}")
        names.append(",".join(words))

    # Some file systems do not distinguish capitals from small letters.
    uses = Counter(name.lower() for name in names)
    distinct_names = []
    for point, name in zip(points, names, strict=True):
        is_usable = len(name) <= _LONGEST_ID and uses[name.lower()] == 1
        if not is_usable:
            name = _with_digest(name, point)
        distinct_names.append(name)
    return distinct_names


def _distinguishing_options(points: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the options in which the points differ; for a single point all of its options."""
    values_by_option: dict[str, set[str | None]] = {}
    for point in points:
        for option in point:
            values_by_option.setdefault(option, set())
    for option, values in values_by_option.items():
        values.update(point.get(option) for point in points)
    if len(points) == 1:
        return list(values_by_option)
    return [option for option, values in values_by_option.items() if len(values) > 1]


def safe_name(text: str, options: Mapping[str, str]) -> str:
    """Return ``text`` as a name that is valid on any file system.

    If the text is too long, has special characters or capital letters, a digest of ``options`` is appended: some file
    systems treat names that differ only in case as equal.
    """
    plain = re.sub(r"[^A-Za-z0-9._+=,-]+", "-", text)
    has_other_characters = plain != text
    has_capitals = text != text.lower()
    is_too_long = len(text) > _LONGEST_ID
    if has_other_characters or has_capitals or is_too_long:
        return _with_digest(plain, options)
    return text


def _with_digest(name: str, options: Mapping[str, str]) -> str:
    """Return ``name``, cut if it is too long, followed by a digest of ``options``."""
    option_text = repr(list(options.items()))
    digest = hashlib.sha256(option_text.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    name_characters = _LONGEST_ID - len(digest) - 1
    return f"{name[:name_characters]}-{digest}"


def _plain(value: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", value).strip("-")


def _labels(options: Iterable[str]) -> dict[str, str]:
    """Return for each option the last part of its path if no other option has the same, else the whole path."""
    last_words = {option: option.rpartition(".")[2] for option in options}
    uses = Counter(last_words.values())
    labels = {}
    for option, word in last_words.items():
        is_unique = uses[word] == 1
        labels[option] = word if is_unique else option
    return labels
