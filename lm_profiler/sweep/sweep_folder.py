"""The folder of a sweep: its locks, its plan, and the cells that have no outcome yet."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lm_profiler.record.files import write_whole
from lm_profiler.record.run_record import RecordError
from lm_profiler.record.secrets import has_secret
from lm_profiler.record.sweep_files import (
    PLAN_FILE,
    Cell,
    SweepPlan,
    read_outcome,
    read_plan,
)
from lm_profiler.sweep.sweep_plan import CONFIGS, SweepPart, run_order
from lm_profiler.usage_error import UsageError

LOCK_FILE = ".lock"
# 5 s in all: the cells of a killed sweep hold the lock until they have ended
_LOCK_TRIES = 50
_LOCK_PAUSE_S = 0.1


class SweepFolder:
    """The folder at ``path`` of a sweep with ``plan``, or with a ``part`` of it; it is locked until it is closed.

    ``lock`` is a file descriptor. The folder is locked as long as any process has the descriptor open: the server that
    starts cells keeps it open until they have ended, but processes that a cell leaves behind must not. ``cells`` are
    the cells that this process runs, in their order. The plan of ``improve`` ``grows``: it begins with one cell, and
    others are added. If such a sweep is resumed, ``plan`` becomes the plan in the folder, with all cells added so far.
    """

    def __init__(
        self,
        path: Path,
        plan: SweepPlan,
        sleep: Callable[[float], None] = time.sleep,
        part: SweepPart | None = None,
        grows: bool = False,
    ) -> None:
        self.path = path
        self.plan = plan
        self._part = part
        self._grows = grows
        self.cells = run_order(plan)
        lock_name = LOCK_FILE
        if part is not None:
            self.cells = part.cells_of(self.cells)
            # the parts of a sweep run at the same time
            lock_name = f"{LOCK_FILE}.{part.number}-of-{part.count}"
        try:
            self._check_plan()  # before anything is created
            self._created_folders = [
                folder for folder in (path, *path.parents) if not folder.exists()
            ]
            path.mkdir(parents=True, exist_ok=True)
            self.lock = _open_lock(path / lock_name)
        except OSError as error:
            raise UsageError(
                f"log_dir: cannot write to {path} ({error.strerror}); choose another folder with --log_dir"
            ) from None
        try:
            self._lock_folder(sleep)
            self._check_plan()  # another sweep may have begun here meanwhile
        except UsageError:
            os.close(self.lock)
            raise
        for name, text in plan.configs.items():
            # a resumed sweep writes the same texts again
            (path / CONFIGS).mkdir(exist_ok=True)
            write_whole(path / CONFIGS / name, text, private=has_secret([text]))

    def __enter__(self) -> SweepFolder:
        return self

    def __exit__(self, *_: object) -> None:
        """Unlock the folder. Remove it if the sweep never began, unless another part of it (a job of an array) runs.

        A sweep has begun once its plan is written. Then ``is_new`` is False, and nothing is removed.
        """
        another_part_runs = any(_is_locked(file) for file in self._other_lock_files())
        if self.is_new and not another_part_runs:
            shutil.rmtree(self.path, ignore_errors=True)
            with suppress(OSError):
                # A parent folder is not empty if another run has begun in it.
                for folder in self._created_folders[1:]:  # the first is ``path``
                    folder.rmdir()
        os.close(self.lock)

    @property
    def is_new(self) -> bool:
        """Whether no sweep has begun in this folder."""
        return not (self.path / PLAN_FILE).exists()

    def begin(self) -> None:
        """Write the plan. Cells need its secrets; if it has any, only the owner of the file can read it."""
        texts = list(self.plan.configs.values())
        for cell in self.plan.cells:
            texts += cell.arguments
        self.plan.write(self.path / PLAN_FILE, private=has_secret(texts))

    def forget(self) -> None:
        """Remove the plan, so that the folder is removed when it is closed."""
        (self.path / PLAN_FILE).unlink(missing_ok=True)

    def missing(self) -> list[Cell]:
        """Return the cells that have no outcome or were interrupted, in the order in which they run."""
        return [cell for cell in self.cells if not is_done(self.path, cell)]

    def _lock_folder(self, sleep: Callable[[float], None]) -> None:
        """Lock the folder; raise UsageError if another sweep holds it."""
        for _ in range(_LOCK_TRIES):
            if _try_to_lock(self.lock) and not self._conflicting_sweep_runs():
                return
            sleep(_LOCK_PAUSE_S)
        raise UsageError(
            f"name: a sweep is running in {self.path}; wait for it, or choose another name with --name"
        )

    def _conflicting_sweep_runs(self) -> bool:
        """Return whether another sweep runs in this folder; other parts of the same division of the sweep may run."""
        for file in self._other_lock_files():
            is_sister_part = self._part is not None and file.name.endswith(
                f"-of-{self._part.count}"
            )
            if not is_sister_part and _is_locked(file):
                return True
        return False

    def _other_lock_files(self) -> list[Path]:
        """Return the lock files in the folder besides our own."""
        lock_status = os.fstat(self.lock)
        others = []
        for file in (self.path / LOCK_FILE, *self.path.glob(f"{LOCK_FILE}.*")):
            if file.exists() and not os.path.samestat(file.stat(), lock_status):
                others.append(file)
        return others

    def _check_plan(self) -> None:
        """Raise UsageError unless the folder is new, or has the same plan."""
        path = self.path
        if self.is_new:
            self._check_no_foreign_files()
            return
        try:
            written_plan = read_plan(path)
        except RecordError as error:
            raise UsageError(
                f"name: the sweep of this name is damaged ({error}); choose another --name"
            ) from None
        compared_cells = 1 if self._grows else None
        written = _comparable_parts(written_plan, compared_cells)
        requested = _comparable_parts(self.plan, compared_cells)
        if written != requested:
            raise UsageError(
                f"name: expected the sweep that was started in {path}, given one with other cells, options or config "
                "files; name another with --name, or remove that folder"
            )
        if self._grows:
            self.plan = written_plan

    def _check_no_foreign_files(self) -> None:
        """Raise UsageError if the folder contains files that do not belong to a sweep."""
        if not self.path.is_dir():
            return
        for child in self.path.iterdir():
            if child.name != CONFIGS and not child.name.startswith(LOCK_FILE):
                raise UsageError(
                    f"name: expected a new folder or a sweep's, given {self.path}; name another with --name"
                )


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _try_to_lock(lock: int) -> bool:
    """Lock the file; return False if another process has locked it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_locked(path: Path) -> bool:
    """Return whether another process has locked ``path``."""
    lock = _open_lock(path)
    try:
        return not _try_to_lock(lock)
    finally:
        os.close(lock)


def is_done(folder: Path, cell: Cell) -> bool:
    """Return whether the cell has ended by itself, with success or failure."""
    outcome = read_outcome(folder, cell.id)
    return outcome is not None and outcome.status != "interrupted"


def _comparable_parts(plan: SweepPlan, cell_count: int | None) -> tuple[object, ...]:
    """Return what two plans of the same sweep have in common, for their first ``cell_count`` cells, or for all."""
    # Paths are not compared, because they may be written differently. A digest compares the contents of the configs.
    path_options = ("--log_dir=", "--config=")
    calls = {}
    for cell in plan.cells[:cell_count]:
        calls[cell.id] = [
            word for word in cell.arguments if not word.startswith(path_options)
        ]
    return plan.config_sha256, plan.verb, plan.seed, calls
