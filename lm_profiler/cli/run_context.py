"""The run of one call as the command line sees it: its folder, the record of a failure, its exit code."""

from __future__ import annotations

import os
import platform
import shutil
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lm_profiler.callbacks import TrainingProfiler
from lm_profiler.callbacks.outcome.failures import status_of
from lm_profiler.callbacks.outcome.rank_status import RANK_LOST
from lm_profiler.callbacks.profiling_options import Launch
from lm_profiler.measure.boundary import first_line, said, say, try_or_note
from lm_profiler.record.calls import FAILED, INTERRUPTED, OK
from lm_profiler.record.entry import Entry
from lm_profiler.record.files import claim_run_dir, from_here, write_whole
from lm_profiler.record.run import Environment, Failure, ModelFacts, RecordError, RunRecord, Status, Verb, read_run
from lm_profiler.record.text import well_formed
from lm_profiler.report.run.run_page import failure_lines
from lm_profiler.tensorboard.summary import write_hparams
from lm_profiler.usage_error import UsageError


def local_rank() -> int:
    """Return this process's number on its machine, as far as it is known before there is a Trainer."""
    return int(os.environ.get("LOCAL_RANK", 0))


class RunContext:
    """What the command line knows of a run, which may fail before it begins.

    Args:
        verb: The Trainer's verb.
        launch: How the run was started.
        log_dir: Folder of all runs.

    Nothing is on disk before ``begin``. Rank 0 alone claims ``folder``, which is None on the other ranks. ``profiler``
    is the instruments' callback, None before there is one; from its set-up on, it writes the record.
    """

    def __init__(self, verb: Verb, launch: Launch, log_dir: str) -> None:
        self.verb = verb
        self.launch = launch
        self.profiler: TrainingProfiler | None = None
        self.rank: int | None = None
        self.folder: Path | None = None
        self._parent = Path(log_dir, launch.name)
        self._made: list[Path] = []

    def begin(self, rank: int) -> None:
        """Claim the run's folder if ``rank``, among all processes of the run, is 0.

        Raises:
            UsageError: the folder cannot be made.
        """
        self.rank = rank
        if rank > 0:
            return
        above = (self._parent, *self._parent.parents)
        self._made = [folder for folder in above if not os.path.exists(folder)]  # noqa: PTH110 - Path's raises for some
        try:
            self.folder = claim_run_dir(self._parent)
        except OSError as error:
            self._remove_made()
            raise UsageError(
                f"log_dir: expected a folder that can be written to, given {self._parent} ({error.strerror}); "
                "name another with --log_dir"
            ) from None

    def of_rank(self, rank: int) -> RunContext:
        """Set the rank in a process that was started for it, and return this context."""
        self.rank, self.folder = rank, None if rank else self.folder
        return self

    def _begin_without_trainer(self) -> None:
        """Claim the folder where no Trainer could be built to tell the rank: the launcher's variables tell it."""
        if self.rank is None:
            with suppress(UsageError):
                self.begin(getattr(rank_zero_only, "rank", 0) or int(os.environ.get("NODE_RANK", 0)))

    def discard(self) -> None:
        """Remove the folder of a run that never began; a recorded run keeps its folder."""
        if self.folder is None or _has_final_record(self.folder):
            return
        # The folder was claimed as a new one, so it holds only what this call has written.
        shutil.rmtree(self.folder)  # then the parents that this call made, if they are empty
        self.folder = None
        self._remove_made()

    def _remove_made(self) -> None:
        for made in self._made:
            with suppress(OSError):  # it was not made, or another run has begun in it
                made.rmdir()

    @property
    def record(self) -> RunRecord | None:
        """The record that the instruments wrote, here or in a process started for rank 0; None before they did."""
        own = None if self.profiler is None else self.profiler.record
        if own is not None or self.folder is None or not _has_final_record(self.folder):
            return own
        with suppress(RecordError):
            return read_run(self.folder)
        return None

    def launched(self, **known: Any) -> None:
        """Add what has become known of the start of the run: fields of its ``Launch``."""
        self.launch = replace(self.launch, **known)
        if self.profiler is not None:
            self.profiler.launched(**known)

    def refuse(self, why: str, remedies: tuple[str, ...], where: Environment, model: ModelFacts | None) -> None:
        """Record that the run was refused, why, on which machine, and for which module."""
        failure = Failure(phase="setup", step=None, type="Refused", message=why, remedies=remedies)
        self._record("refused", failure, environment=where, model=model)

    def is_refusal(self, error: BaseException) -> bool:
        """Whether ``error``, ours or Lightning's, came before the first step and so means a wrong call."""
        record = self.record
        begun = record is not None and record.status != "refused"
        return not begun and isinstance(error, (UsageError, MisconfigurationException))

    def ended(self, error: BaseException) -> int:
        """Return the exit code of a run that a signal or ``sys.exit`` ended; an interrupt is recorded."""
        record = self.record
        self._begin_without_trainer()
        # Lightning turns KeyboardInterrupt into `exit(1)`, at whatever point.
        interrupt = error if isinstance(error, KeyboardInterrupt) else error.__context__
        if isinstance(interrupt, KeyboardInterrupt):
            if record is None and not self.rank:
                self._record("interrupted", _failure(interrupt))
                where = f"; written to {from_here(self.folder)}" if self.folder is not None else ""
                say(f"interrupted before the first step{where}")
            return INTERRUPTED
        code = error.code if isinstance(error, SystemExit) else FAILED
        return code if isinstance(code, int) else OK if code is None else FAILED

    def failed(self, error: Exception) -> int:
        """Write the traceback, and a record if there is none yet; return the exit code."""
        self._begin_without_trainer()
        record = self.record
        if record is None:
            self._record(status_of(error), _failure(error))
        if record is None or record.failure is None:  # otherwise the table at the run's end has printed it
            who = f"rank {self.rank} failed" if self.rank else "failed" if record is not None else "failed in setup"
            say(f"{who}: {said(error)}")
        folder = getattr(self.profiler, "folder", None) or self.folder
        if folder is not None and folder.is_dir():  # a node without a shared disk may have none
            path = folder / (f"traceback.rank{self.rank}.txt" if self.rank else "traceback.txt")
            path.write_text(well_formed("".join(traceback.format_exception(error))), encoding="utf-8")
            say(f"traceback in {from_here(path)}")
        return INTERRUPTED if record is not None and record.status == "interrupted" else FAILED

    def last_words(self, why: str, number: int, lost: int) -> int:
        """Write the record from the watchdog's thread, since the main one is stuck; return the exit code.

        Args:
            why: What has happened.
            number: The signal's number; 0 for none.
            lost: The number, from 1, of a rank that this process started and that has ended; 0 for none.
        """
        status: Status = "interrupted" if number else "failed"
        if self.profiler is None or not self.profiler.last_words(status, why, followed=not number):
            failure = Failure(phase="setup", step=None, type="Stuck", message=why)
            if lost:  # that rank ended before it knew the folder, so it left no record
                rank, host = (self.rank or 0) + lost, platform.node()
                failure = failure.model_copy(update={"type": RANK_LOST, "rank": rank, "host": host})
            self._record(status, failure)
            if self.folder is not None:
                say(f"{status} in {failure.where}: {why}; written to {from_here(self.folder)}")
        elif (record := self.record) is not None:
            status = record.status
            say(f"{failure_lines(record)[0]}; written to {from_here(self.profiler.folder)}")
        return INTERRUPTED if status == "interrupted" else FAILED

    def _record(self, status: Status, failure: Failure, **known: Any) -> None:
        folder, launch = self.folder, self.launch
        if folder is None or _has_final_record(folder):
            return
        if launch.config_yaml is not None:
            write_whole(folder / "config.yaml", launch.config_yaml)
        record = RunRecord(**launch.facts(), status=status, failure=failure, verb=self.verb, **known)
        record.write(folder / "run.json")
        # The record is complete without HPARAMS, so a failure here is a note.
        try_or_note("HPARAMS in TensorBoard", lambda: write_hparams(Entry(folder, record)), [])


def _has_final_record(folder: Path) -> bool:
    """Whether the folder holds a record of how the run ended; an ``unfinished`` one is not."""
    try:
        return read_run(folder).status != "unfinished"
    except RecordError:
        return (folder / "run.json").exists()


def _failure(error: BaseException) -> Failure:
    return Failure(phase="setup", step=None, type=type(error).__name__, message=first_line(error))
