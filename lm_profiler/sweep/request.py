"""The options of a sweep, and which of its cells this process runs.

Values of options stay the text that was written, because the cells' parser reads them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args

import yaml

from lm_profiler.record.calls import config_file
from lm_profiler.record.run import Verb
from lm_profiler.usage_error import UsageError, expect, expect_one_of

Item = TypeVar("Item")

# The variable with a pod's index, from 0, in an Indexed Job. No variable holds the number of pods.
_POD_INDEX = "JOB_COMPLETION_INDEX"


@dataclass(frozen=True)
class SweepPart:
    """The ``number``-th of ``count`` parts, counted from 1."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def of(self, cells: Sequence[Item]) -> list[Item]:
        """Return every ``count``-th of all ``cells``: the same ones, whatever has run by now."""
        return list(cells[self.number - 1 :: self.count])


def part_of(given: str | None, environment: Mapping[str, str]) -> SweepPart | None:
    """Return the part of a sweep that this process runs; None for the whole sweep.

    ``2/8`` names it. ``/8`` takes the index from the scheduler: a task of a SLURM job array, or a pod of a Kubernetes
    Indexed Job. Without ``given``, a SLURM job array tells index and count.

    Raises:
        UsageError: ``given`` names no part, or the scheduler does not tell enough.
    """
    array = _slurm_part(environment)
    if given is None:
        if array is None and _POD_INDEX in environment:
            raise UsageError(f"part: expected how many pods there are with {_POD_INDEX}, given none; say --part /8")
        return array
    size = re.fullmatch(r"(\d*)/(\d+)", given.strip())
    if size is None:
        raise UsageError(f"part: expected a part such as 1/8, given {given[:100]!r}")
    count = int(size[2])
    if size[1]:
        number = int(size[1])
    elif array is not None:
        number = array.number
    elif environment.get(_POD_INDEX, "").isdecimal():
        number = int(environment[_POD_INDEX]) + 1
    else:
        raise UsageError(f"part: expected a number, as in 1{given.strip()}, outside of a job array, given {given!r}")
    if not 1 <= number <= count:
        raise UsageError(f"part: expected one from 1/{count} to {count}/{count}, given {number}/{count}")
    return SweepPart(number, count)


def _slurm_part(environment: Mapping[str, str]) -> SweepPart | None:
    names = ("ID", "MIN", "STEP", "COUNT")
    values = [environment.get(f"SLURM_ARRAY_TASK_{name}", "1" if name == "STEP" else "") for name in names]
    if not all(value.isdecimal() for value in values):
        return None
    task, first, step, count = map(int, values)
    return SweepPart((task - first) // max(step, 1) + 1, count)


_OPTION = re.compile(r"[A-Za-z_][\w.+-]*")


@dataclass(frozen=True, kw_only=True)
class Request:
    """Run every combination of some options, each in a process of its own, and keep what became of each.

    Started again, it goes on with what is missing. A cell whose folder is removed is missing again.

    Args:
        file: YAML with any of these options, or the name of a sweep that comes with the package.
        config: Config of every cell, or the name of one that comes with the package, such as demo.
        grid: Values of an option, as in --grid.model.size small,medium; every combination is run. Values that are
            lists: [1,2],[3,4].
        list: Sets of options, as in "[{model.size: small}]"; each is run with every combination of the grid.
        options: Further options of every cell.
        verb: What the cells run; may be swept as well, as --grid.verb fit,validate.
        repeats: Runs of each cell, in rounds of random order.
        seed: Seed of that order.
        timeout_s: Longest time of a cell in seconds; no limit if not given.
        name: Name of the sweep; if not given, the file's.
        log_dir: Folder of all runs.
        devices: One cell at a time runs on each of these; [0,1],[2,3] are two pairs. As in CUDA_VISIBLE_DEVICES.
        launcher: Send the cells to a cluster through submitit: slurm; local and debug try it on this machine.
        slurm: Options of SLURM, such as --slurm.partition=gpu.
        local: Options of submitit's local cluster.
        debug: Options of submitit's debug cluster.
        part: Run a part of the cells, such as 2/8: in a job array each task runs its own. If not given, SLURM's array
            says it; in a Kubernetes Indexed Job, /8 is enough.
        dry_run: Print the cells' calls, one a line, and run none.
        command: The whole call.

    Raises:
        UsageError: these do not go together; the message is a line.
    """

    WORDS: ClassVar[str] = "file"
    FILE: ClassVar[str] = "file"
    SHIPPED: ClassVar[str] = "sweeps"

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
    launcher: Literal["slurm", "local", "debug"] | None = None
    slurm: Mapping[str, str] = field(default_factory=dict)
    local: Mapping[str, str] = field(default_factory=dict)
    debug: Mapping[str, str] = field(default_factory=dict)
    part: str | None = field(default=None, compare=False)
    dry_run: bool = False
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
        self._check_cluster()

    @property
    def folder(self) -> Path:
        """The folder of the sweep."""
        return Path(self.log_dir, self.name)

    @property
    def cluster(self) -> dict[str, Any]:
        """The options of the cluster, under submitit's names."""
        kinds = {"slurm": self.slurm, "local": self.local, "debug": self.debug}
        return {f"{kind}_{key}": yaml.safe_load(kinds[kind][key]) for kind in kinds for key in kinds[kind]}

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
            if name in fixed:
                raise UsageError(f"{name}: expected either swept or the same for all cells, given both")
            if name in self.grid and name in listed:
                raise UsageError(f"{name}: expected in grid or in list, given in both")
        for verb in (*self.grid.get("verb", ()), *(entry["verb"] for entry in self.list if "verb" in entry)):
            expect_one_of(get_args(Verb), "verb", verb)
        for name, values in (*((f"grid.{name}", self.grid[name]) for name in self.grid), ("devices", self.devices)):
            if len(set(values)) < len(values):
                remedy = "run cells again with repeats" if name != "devices" else "each runs one cell at a time"
                raise UsageError(f"{name}: expected each value once, given {', '.join(values)}; {remedy}")

    def _check_cluster(self) -> None:
        if self.launcher is None:
            for name in self.cluster:
                raise UsageError(f"{name.replace('_', '.', 1)}: expected only with --launcher, given without")
        elif self.timeout_s is None:
            raise UsageError("timeout_s: expected with --launcher, given none; a cluster needs a job's longest time")
        elif self.part is not None:
            raise UsageError("part: expected without --launcher, given with it; there each cell is a job of its own")
        elif self.devices:
            raise UsageError("devices: expected without --launcher, given with it; the cluster hands out devices")


def check_folder_name(name: str, log_dir: str) -> None:
    """Raise UsageError for a ``name`` whose folder would not lie below ``log_dir``."""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise UsageError(f"name: expected the name of a folder below {log_dir}, given {name!r}")
