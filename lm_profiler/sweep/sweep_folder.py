"""The folder of a sweep: its locks, its plan, and which of its cells have no outcome yet."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lm_profiler.processes.fork_server import ENDED_FILE
from lm_profiler.record.files import read_json, write_whole
from lm_profiler.record.run import RecordError
from lm_profiler.record.secrets import holds_secret
from lm_profiler.record.sweep import PLAN_FILE, Cell, SweepPlan, read_outcome, read_plan
from lm_profiler.sweep.outcome import Ended, record_outcome
from lm_profiler.sweep.request import SweepPart
from lm_profiler.sweep.sweep_plan import CONFIGS, run_order
from lm_profiler.usage_error import UsageError

LOCK_FILE = ".lock"
_PATIENCE_S = 5.0  # seconds to wait for the lock: the cells of a killed sweep hold it until they have ended


class SweepFolder:
    """The folder at ``path``, locked for ``plan``, or for a ``part`` of it beside others, until it is closed.

    ``lock`` is a file descriptor: the folder is locked as long as any process has it open. The server that starts cells
    holds it until they have ended; processes that a cell leaves behind must not hold it. ``cells`` are this process's
    own, in the order in which they run.

    Raises:
        UsageError: the folder is another sweep's, is locked by another process, or cannot be made.
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
            if part is not None:  # the server of this part holds the lock of the part
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
        for name, text in plan.configs.items():  # a sweep that goes on writes the same texts again
            (path / CONFIGS).mkdir(exist_ok=True)
            write_whole(path / CONFIGS / name, text, private=holds_secret([text]))

    def __enter__(self) -> SweepFolder:
        return self

    def __exit__(self, *_: object) -> None:
        """Unlock the folder; a sweep that never began is removed."""
        if self.is_new and (self._part is None or _locked(self._whole, fcntl.LOCK_EX)):  # no other part has it
            shutil.rmtree(self.path, ignore_errors=True)
            with suppress(OSError):  # another run has begun beside it
                for folder in self._made[1:]:
                    folder.rmdir()
        self._close()

    def _close(self) -> None:
        for lock in {self._whole, self.lock}:
            os.close(lock)

    @property
    def is_new(self) -> bool:
        """Whether no sweep has begun in this folder."""
        return not (self.path / PLAN_FILE).exists()

    def begin(self) -> None:
        """Write the plan with its secrets, which the cells need; a plan with secrets is readable for its owner only."""
        words = [word for cell in self.plan.cells for word in cell.arguments]
        private = holds_secret([*words, *self.plan.configs.values()])
        self.plan.write(self.path / PLAN_FILE, private)

    def forget(self) -> None:
        """Remove the plan, so that the folder is removed when it is closed."""
        (self.path / PLAN_FILE).unlink(missing_ok=True)

    def take_over(self) -> None:
        """Write the outcomes of cells that ended after their sweep was killed."""
        for cell in self.cells:
            if read_outcome(self.path, cell.id) is None:
                with suppress(OSError, ValueError, TypeError, KeyError):  # not ended, or a damaged file
                    ended = read_json(self.path / cell.id / ENDED_FILE)
                    record_outcome(self.path, cell, Ended(ended["code"], ended["duration_s"]))

    def missing(self) -> list[Cell]:
        """Return the cells without an outcome, or with an interrupt as outcome, in the order in which they run."""
        return [cell for cell in self.cells if not is_done(self.path, cell)]

    def _take(self, sleep: Callable[[float], None]) -> None:
        until = time.monotonic() + _PATIENCE_S
        while not self._taken():
            if time.monotonic() > until:
                raise UsageError(
                    f"name: expected a sweep that is not running, given {self.path}, where one is; "
                    "wait for it, or name another with --name"
                )
            sleep(0.1)

    def _taken(self) -> bool:
        """Try to lock the folder; return whether only parts of the same count are beside this one."""
        beside = None if self._part is None else f"-of-{self._part.count}"
        others = [file for file in self.path.glob(f"{LOCK_FILE}.*") if beside is None or not file.name.endswith(beside)]
        # A part shares the lock of the whole with other parts; a whole sweep excludes all of them.
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
    """Whether the cell has ended by itself, well or badly."""
    outcome = read_outcome(folder, cell.id)
    return outcome is not None and outcome.status != "interrupted"


def clear(folder: Path, cell: Cell) -> Path:
    """Empty the cell's folder and return it."""
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
    """Return why two plans are not the same sweep, so that their results do not mix; None if they are."""
    if old.config_sha256 != new.config_sha256:
        return "another config file, or one that was changed since"
    before, after = _calls(old), _calls(new)
    if old.verb != new.verb or before.keys() != after.keys():
        return "other cells"
    if before != after:
        return "other options for all cells"
    return "another seed" if old.seed != new.seed else None


def _calls(plan: SweepPlan) -> dict[str, list[str]]:
    """Return each cell's arguments without paths: a path may be written in another way, or have moved."""
    where = ("--log_dir=", "--config=")  # the configs' contents are compared by their digest
    return {cell.id: [part for part in cell.arguments if not part.startswith(where)] for cell in plan.cells}
