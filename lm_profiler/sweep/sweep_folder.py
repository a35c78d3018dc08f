"""A sweep's folder: one sweep at a time or its parts, the same plan each time, and what is still missing in it."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lm_profiler.processes.cell_server import ENDED_FILE
from lm_profiler.record.files import read_json, write_whole
from lm_profiler.record.run import RecordError
from lm_profiler.record.secrets import holds_secret
from lm_profiler.record.sweep import PLAN_FILE, Cell, SweepPlan, read_outcome, read_plan
from lm_profiler.sweep.outcome import Ended, record_outcome
from lm_profiler.sweep.request import SweepPart
from lm_profiler.sweep.sweep_plan import CONFIGS, run_order
from lm_profiler.usage_error import UsageError

LOCK_FILE = ".lock"
_PATIENCE_S = 5.0


class SweepFolder:
    """The folder at ``path``, taken for ``plan``, or for a ``part`` of it beside others, until it is closed.

    ``lock`` is a descriptor: the folder is taken as long as any process has it open. Whoever starts what writes into
    the folder must have it until that has ended; what that leaves behind must not. ``cells`` are those that are this
    process's own, in the order in which they are run.

    Raises:
        UsageError: it is another sweep's, another process has it, or it cannot be made.
    """

    def __init__(
        self,
        path: Path,
        plan: SweepPlan,
        sleep: Callable[[float], None] = time.sleep,
        part: SweepPart | None = None,
    ) -> None:
        self.path, self.plan, self._part = path, plan, part
        self.cells = run_order(plan) if part is None else part.of(run_order(plan))
        try:
            _check_plan(path, plan)
            self._made = [folder for folder in (path, *path.parents) if not folder.exists()]
            path.mkdir(parents=True, exist_ok=True)
            self._whole = self.lock = _opened(path / LOCK_FILE)
            if part is not None:  # its server keeps its part's open
                self.lock = _opened(path / f"{LOCK_FILE}{_suffix(part)}")
        except OSError as error:
            raise UsageError(
                f"log_dir: expected a folder that can be written to, given {path} ({error.strerror}); "
                "name another with --log_dir"
            ) from None
        try:
            self._take(sleep)
            _check_plan(path, plan)  # another sweep may have begun here meanwhile
        except UsageError:
            self._close()
            raise
        for name, text in plan.configs.items():  # of an earlier try: the same
            (path / CONFIGS).mkdir(exist_ok=True)
            write_whole(path / CONFIGS / name, text, private=holds_secret([text]))

    def __enter__(self) -> SweepFolder:
        return self

    def __exit__(self, *_: object) -> None:
        """Give it back; of a sweep that never began, nothing is left."""
        if self.is_new and (self._part is None or _locked(self._whole, fcntl.LOCK_EX)):  # no other part begins
            shutil.rmtree(self.path, ignore_errors=True)
            with suppress(OSError):  # another run has begun beside it meanwhile
                for folder in self._made[1:]:
                    folder.rmdir()
        self._close()

    def _close(self) -> None:
        for lock in {self._whole, self.lock}:
            os.close(lock)

    @property
    def is_new(self) -> bool:
        """Whether nothing has begun here."""
        return not (self.path / PLAN_FILE).exists()

    def begin(self) -> None:
        """Write the plan, whose cells need the secrets that they were given."""
        words = [word for cell in self.plan.cells for word in cell.arguments]
        private = holds_secret([*words, *self.plan.configs.values()])
        self.plan.write(self.path / PLAN_FILE, private)

    def forget(self) -> None:
        """Nothing has begun here after all: nothing of it is left where it is given back."""
        (self.path / PLAN_FILE).unlink(missing_ok=True)

    def take_over(self) -> None:
        """Judge the cells that ended when nobody was left to write down how."""
        for cell in self.cells:
            if read_outcome(self.path, cell.id) is None:
                with suppress(OSError, ValueError, TypeError, KeyError):  # it did not end, or that file is damaged
                    ended = read_json(self.path / cell.id / ENDED_FILE)
                    record_outcome(self.path, cell, Ended(ended["code"], ended["duration_s"]))

    def missing(self) -> list[Cell]:
        """The cells that have no outcome, in the order in which they are run; one that was interrupted has none."""
        return [cell for cell in self.cells if not is_done(self.path, cell)]

    def _take(self, sleep: Callable[[float], None]) -> None:
        until = time.monotonic() + _PATIENCE_S
        while not self._taken():
            if time.monotonic() > until:  # the cells of a sweep that was killed are gone by now
                raise UsageError(
                    f"name: expected a sweep that is not running, given {self.path}, where one is; "
                    "wait for it, or name another with --name"
                )
            sleep(0.1)

    def _taken(self) -> bool:
        """Whether it is ours now: nobody else has it, but for other parts beside ours."""
        beside = None if self._part is None else f"-of-{self._part.count}"
        others = [file for file in self.path.glob(f"{LOCK_FILE}.*") if beside is None or not file.name.endswith(beside)]
        ours = _locked(self._whole, fcntl.LOCK_EX if self._part is None else fcntl.LOCK_SH)
        return ours and _locked(self.lock, fcntl.LOCK_EX) and all(map(_is_free, others))


def _suffix(part: SweepPart) -> str:
    return f".{part.number}-of-{part.count}"


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _locked(lock: int, how: int) -> bool:
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_free(path: Path) -> bool:
    lock = _opened(path)
    try:
        return _locked(lock, fcntl.LOCK_EX)
    finally:
        os.close(lock)


def is_done(folder: Path, cell: Cell) -> bool:
    """Whether the cell has run to an end of its own, a bad one included."""
    outcome = read_outcome(folder, cell.id)
    return outcome is not None and outcome.status != "interrupted"


def clear(folder: Path, cell: Cell) -> Path:
    """Remove what an earlier try of the cell left, and return its folder, empty."""
    own = folder / cell.id
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    return own


def _is_ours(name: str) -> bool:
    return name in (LOCK_FILE, CONFIGS) or name.startswith(f"{LOCK_FILE}.")


def _check_plan(path: Path, plan: SweepPlan) -> None:
    if not (path / PLAN_FILE).exists():
        if path.is_dir() and any(not _is_ours(child.name) for child in path.iterdir()):
            raise UsageError(f"name: expected a new folder or a sweep's, given {path}; name another with --name")
        return
    try:
        other = read_plan(path)
    except RecordError as error:
        raise UsageError(f"name: expected a sweep, given a damaged one ({error}); name another with --name") from None
    if (unlike := difference(other, plan)) is not None:
        raise UsageError(
            f"name: expected the sweep that was started in {path}, given one with {unlike}; "
            "name another with --name, or remove that folder"
        )


def difference(old: SweepPlan, new: SweepPlan) -> str | None:
    """What keeps results of the two from standing in one table, or from being the same cells; None for nothing."""
    if old.config_sha256 != new.config_sha256:
        return "another config file, or one that was changed since"
    before, after = _calls(old), _calls(new)
    if old.verb != new.verb or before.keys() != after.keys():
        return "other cells"
    if before != after:
        return "other options for all cells"
    return "another seed" if old.seed != new.seed else None


def _calls(plan: SweepPlan) -> dict[str, list[str]]:
    """Each cell's arguments but for where its files are: that may be written in another way, or have moved."""
    where = ("--log_dir=", "--config=")  # what is in the configs is compared by itself
    return {cell.id: [part for part in cell.arguments if not part.startswith(where)] for cell in plan.cells}
