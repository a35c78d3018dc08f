"""Runs what the search asks for, each in a process of its own; what has run already is read from its folder.

A cell stands for a setting and a number, whoever asked for it: its folder is all that a search that was killed needs.
"""

from __future__ import annotations

import hashlib
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lm_profiler.record.entry import Entry
from lm_profiler.record.reading import RecordError
from lm_profiler.record.run import RunRecord, read_run
from lm_profiler.record.sweep import Cell, CellOutcome, SweepPlan, read_outcome, read_plan
from lm_profiler.sweep.folder import SweepFolder, difference, is_done
from lm_profiler.usage_error import UsageError

FIRST, CHECK = "first", "check"
"""The name of the first setting's cells, and the end of the name of those whose numbers are looked at."""

_LONGEST_ID = 100
_TIMED = {f"{name}.steps": "0" for name in ("actions", "memory", "trace", "whatif")} | {"numerics.audit": "false"}
"""Of cells that are only timed: whatever comes after the measured steps is left out."""
_CHECKED = {**_TIMED, "memory.steps": "1", "numerics.audit": "true", "numerics.losses": "10"}
_LOOKED = {"numerics.audit": "true", "numerics.losses": "10"}


class Interrupted(Exception):
    """Somebody does not want to wait for the rest."""


class NoSteps(Exception):
    """A run that did not end well; the message says why in a few words."""


@dataclass(frozen=True)
class RanCell:
    """A cell that has run.

    Attributes:
        entry: Its run, and what is known of it.
        outcome: How it ended.
        took_s: From its start to its end; 0 for what was asked for before.
    """

    entry: Entry
    outcome: CellOutcome
    took_s: float

    @property
    def record(self) -> RunRecord:
        """Of a run that ended well.

        Raises:
            NoSteps: it did not.
        """
        if self.outcome.status != "ok" or self.entry.record is None:
            raise NoSteps(f"{self.outcome.status}: {self.outcome.reason or 'no reason given'}")
        return self.entry.record


class Cells:
    """All runs of one improvement.

    Args:
        folder: Where they are; its plan grows by each cell that is asked for.
        call: The arguments of the first setting's call, the verb first.
        run: Runs a cell, and returns when it has an outcome; until then, it was interrupted.
    """

    def __init__(self, folder: SweepFolder, call: Sequence[str], run: Callable[[Cell], None]) -> None:
        self.folder, self._call, self._run = folder, call, run
        self._asked: set[str] = set()
        self._shared: set[str] = set()

    def look(self) -> RanCell:
        """The first setting, with all instruments."""
        return self._done(look_cell(self.folder.path, self._call))

    def check(self, options: Mapping[str, str]) -> RanCell:
        """A setting whose numbers are looked at."""
        return self._done(_cell(self.folder.path, self._call, options, CHECK, _CHECKED))

    def time(self, options: Mapping[str, str], number: int) -> RanCell:
        """A setting, timed for the ``number``-th time."""
        return self._done(timed_cell(self.folder.path, self._call, options, number))

    def _done(self, cell: Cell) -> RanCell:
        """What became of ``cell``, which is run if it has not been.

        Raises:
            Interrupted: somebody does not want to wait.
        """
        path, again = self.folder.path, cell.id in self._asked
        self._asked.add(cell.id)
        if not is_done(path, cell):
            self._add(cell)
            self._run(cell)
        outcome = read_outcome(path, cell.id)
        if outcome is None or (outcome.status == "interrupted" and not _killed(outcome)):
            raise Interrupted
        run = path / outcome.run if outcome.run is not None else path / cell.id
        try:
            record = read_run(run)
        except RecordError:
            record = None
        if record is not None and "shared" in record.words:
            self._shared.add(cell.id)
        return RanCell(Entry(run, record, cell, outcome, path), outcome, 0.0 if again else outcome.duration_s)

    @property
    def count(self) -> int:
        """Processes that were asked for."""
        return len(self._asked)

    @property
    def shared(self) -> int:
        """Those of them that shared the machine with something else."""
        return len(self._shared)

    def _add(self, cell: Cell) -> None:
        """Have the plan name the cell before there is anything of it."""
        plan = self.folder.plan
        if cell.id not in {known.id for known in plan.cells}:
            self.folder.plan = plan.model_copy(update={"cells": [*plan.cells, cell]})
            self.folder.begin()


def _killed(outcome: CellOutcome) -> bool:
    """Whether it alone was, as by the kernel where memory is out: the search goes on without it."""
    return outcome.exit_code == -signal.SIGKILL


def look_cell(folder: Path, call: Sequence[str]) -> Cell:
    """The cell of ``Cells.look``: the first of all."""
    return _cell(folder, call, {}, "look", _LOOKED)


def timed_cell(folder: Path, call: Sequence[str], options: Mapping[str, str], number: int) -> Cell:
    """The cell of ``Cells.time``."""
    return _cell(folder, call, options, f"r{number}", _TIMED, number)


def _cell(
    folder: Path,
    call: Sequence[str],
    options: Mapping[str, str],
    suffix: str,
    instruments: Mapping[str, str],
    number: int = 0,
) -> Cell:
    """The cell of a setting: ``call`` with these ``options``, in whatever order they are given."""
    options = dict(sorted(options.items()))
    shown = options if instruments is _TIMED else {**options, "numerics.audit": "true"}
    cell_id = f"{_name(options)},{suffix}"
    words = [f"--{name}={text}" for name, text in {**instruments, **options}.items()]
    arguments = [*call, *words, f"--log_dir={folder}", f"--name={cell_id}"]
    return Cell(id=cell_id, overrides=shown, repeat=number, arguments=arguments)


def _name(options: Mapping[str, str]) -> str:
    """Of letters that any file system takes; what they cannot tell apart, a digest does."""
    if not options:
        return FIRST
    text = ",".join(f"{name.removeprefix('trainer.')}={value}" for name, value in options.items())
    plain = re.sub(r"[^A-Za-z0-9._+=,-]+", "-", text)
    if plain == text and len(text) <= _LONGEST_ID and text == text.lower():
        return text
    digest = hashlib.sha256(repr(options).encode()).hexdigest()[:8]
    return f"{plain[: _LONGEST_ID - 9]}-{digest}"


def begun(path: Path, plan: SweepPlan) -> SweepPlan:
    """``plan``, with the cells that were asked for where the same improvement has begun at ``path``.

    Raises:
        UsageError: something else was begun there.
    """
    try:
        known = read_plan(path)
    except RecordError:  # nothing, or nothing that can be read: that is told where the folder is taken
        return plan
    unlike = difference(known.model_copy(update={"cells": known.cells[:1]}), plan)
    if unlike is not None:
        raise UsageError(
            f"name: expected what was begun in {path}, given a call with {unlike}; "
            "name another with --name, or remove that folder"
        )
    return known


def plan_of(name: str, command: str, configs: Mapping[str, str], cells: Sequence[Cell]) -> SweepPlan:
    """The plan of an improvement that has asked for ``cells`` so far."""
    texts = "".join(configs.values()).encode()
    return SweepPlan(
        name=name,
        command=command,
        verb="fit",
        seed=0,
        config_sha256=hashlib.sha256(texts).hexdigest() if configs else None,
        configs=dict(configs),
        cells=list(cells),
    )
