"""The folder of a sweep: its locks, its plan, and which of its cells have no outcome yet."""

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
from lm_profiler.record.secrets import holds_secret
from lm_profiler.record.sweep_files import PLAN_FILE, Cell, SweepPlan, read_outcome, read_plan
from lm_profiler.sweep.sweep_plan import CONFIGS, SweepPart, run_order
from lm_profiler.usage_error import UsageError

LOCK_FILE = ".lock"
_TRIES, _PAUSE_S = 50, 0.1  # to wait 5 s for the lock: the cells of a killed sweep hold it until they have ended


class SweepFolder:
    """The folder at ``path``, locked until it is closed for ``plan``, or for a ``part`` of it next to other parts.

    ``lock`` is a file descriptor: the folder is locked as long as any process has it open. The server that starts cells
    holds it until they have ended; processes that a cell leaves behind must not hold it. ``cells`` are this process's
    own, in the order in which they run. A plan that ``grows`` begins with its first cell; cells that it had when it was
    killed are in ``plan`` again.
    """

    def __init__(
        self,
        path: Path,
        plan: SweepPlan,
        sleep: Callable[[float], None] = time.sleep,
        part: SweepPart | None = None,
        grows: bool = False,
    ) -> None:
        self.path, self.plan, self._part, self._grows = path, plan, part, grows
        self.cells = run_order(plan) if part is None else part.among(run_order(plan))
        try:
            self._check_plan()
            self._made = [folder for folder in (path, *path.parents) if not folder.exists()]
            path.mkdir(parents=True, exist_ok=True)
            self.lock = _opened(path / (LOCK_FILE if part is None else f"{LOCK_FILE}.{part.number}-of-{part.of}"))
        except OSError as error:
            raise UsageError(
                f"log_dir: expected a folder that can be written to, given {path} ({error.strerror}); "
                "name another with --log_dir"
            ) from None
        try:
            self._take(sleep)
            self._check_plan()  # another sweep may have begun here meanwhile
        except UsageError:
            os.close(self.lock)
            raise
        for name, text in plan.configs.items():  # a resumed sweep writes the same texts again
            (path / CONFIGS).mkdir(exist_ok=True)
            write_whole(path / CONFIGS / name, text, private=holds_secret([text]))

    def __enter__(self) -> SweepFolder:
        return self

    def __exit__(self, *_: object) -> None:
        """Unlock the folder; a sweep that never began is removed."""
        if self.is_new and not any(map(_is_taken, self._locks())):  # no other part has it
            shutil.rmtree(self.path, ignore_errors=True)
            with suppress(OSError):  # another run has begun beside it
                for folder in self._made[1:]:
                    folder.rmdir()
        os.close(self.lock)

    @property
    def is_new(self) -> bool:
        """Whether no sweep has begun in this folder."""
        return not (self.path / PLAN_FILE).exists()

    def begin(self) -> None:
        """Write the plan with its secrets, which the cells need; only its owner can read a plan with secrets."""
        words = [word for cell in self.plan.cells for word in cell.arguments]
        private = holds_secret([*words, *self.plan.configs.values()])
        self.plan.write(self.path / PLAN_FILE, private)

    def forget(self) -> None:
        """Remove the plan, so that the folder is removed when it is closed."""
        (self.path / PLAN_FILE).unlink(missing_ok=True)

    def missing(self) -> list[Cell]:
        """Return the cells without an outcome, or with an interrupt as outcome, in the order in which they run."""
        return [cell for cell in self.cells if not is_done(self.path, cell)]

    def _take(self, sleep: Callable[[float], None]) -> None:
        for _ in range(_TRIES):
            if _locked(self.lock) and not any(map(_is_taken, self._locks(excluding=self._part))):
                return
            sleep(_PAUSE_S)
        raise UsageError(
            f"name: expected a sweep that is not running, given {self.path}, where one is; "
            "wait for it, or name another with --name"
        )

    def _locks(self, excluding: SweepPart | None = None) -> list[Path]:
        """Return the lock files of others in this folder, without those of parts of the same count as ``excluding``."""
        own = os.fstat(self.lock)
        beside = None if excluding is None else f"-of-{excluding.of}"
        files = [self.path / LOCK_FILE, *self.path.glob(f"{LOCK_FILE}.*")]
        others = [file for file in files if file.exists() and not os.path.samestat(file.stat(), own)]
        return [file for file in others if beside is None or not file.name.endswith(beside)]

    def _check_plan(self) -> None:
        """Raise UsageError unless the folder is new, or has the same plan."""
        path = self.path
        if not (path / PLAN_FILE).exists():
            children = [child.name for child in path.iterdir()] if path.is_dir() else []
            if not all(name == CONFIGS or name.startswith(LOCK_FILE) for name in children):
                raise UsageError(f"name: expected a new folder or a sweep's, given {path}; name another with --name")
            return
        try:
            known = read_plan(path)
        except RecordError as error:
            raise UsageError(f"name: expected a sweep, given a damaged one ({error}); take another --name") from None
        count = 1 if self._grows else None
        if _identity(known, count) != _identity(self.plan, count):
            raise UsageError(
                f"name: expected the sweep that was started in {path}, given one with other cells, options or config "
                "files; name another with --name, or remove that folder"
            )
        if self._grows:
            self.plan = known


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_taken(path: Path) -> bool:
    lock = _opened(path)
    try:
        return not _locked(lock)
    finally:
        os.close(lock)


def is_done(folder: Path, cell: Cell) -> bool:
    """Whether the cell has ended by itself, with success or failure."""
    outcome = read_outcome(folder, cell.id)
    return outcome is not None and outcome.status != "interrupted"


def _identity(plan: SweepPlan, count: int | None) -> tuple[object, ...]:
    """Return what two plans of one sweep share, for their first ``count`` cells."""
    # A path may be written differently, or have moved; the configs' contents are compared by digest.
    where = ("--log_dir=", "--config=")
    calls = {cell.id: [word for word in cell.arguments if not word.startswith(where)] for cell in plan.cells[:count]}
    return plan.config_sha256, plan.verb, plan.seed, calls
