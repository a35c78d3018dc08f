"""The run of one call as the command line sees it: its folder, what is left there if it dies, its exit code."""

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
from lm_profiler.callbacks.launch import Launch
from lm_profiler.callbacks.outcome.failures import status_of
from lm_profiler.callbacks.outcome.rank_status import RANK_LOST
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
    """This process's number among those of its machine, as far as that is known before there is a Trainer."""
    return int(os.environ.get("LOCAL_RANK", 0))


class RunContext:
    """What the command line knows of a run, which may come to nothing.

    Args:
        verb: What it runs.
        launch: How it was started.
        log_dir: Folder of all runs.

    Until ``begin`` there is nothing of it. ``folder`` is claimed by rank 0 alone; None on the others. ``profiler`` is
    the instruments' callback once there is one: from its set-up on, it writes the record itself.
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
        """Claim the folder, if this is ``rank`` 0 of all processes of the run.

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
        """This context in a process that was started for ``rank``."""
        self.rank, self.folder = rank, None if rank else self.folder
        return self

    def _begin_late(self) -> None:
        """Where not even a Trainer could be made, which knows the rank: the variables of whoever launched this tell."""
        if self.rank is None:
            with suppress(UsageError):
                self.begin(getattr(rank_zero_only, "rank", 0) or int(os.environ.get("NODE_RANK", 0)))

    def discard(self) -> None:
        """Leave nothing of a run that never was; the folder of one that was recorded stays."""
        if self.folder is None or _is_told(self.folder):
            return
        # Nothing but what this call itself has put there: the folder was claimed as a new one.
        shutil.rmtree(self.folder)
        self.folder = None
        self._remove_made()

    def _remove_made(self) -> None:
        for made in self._made:
            with suppress(OSError):  # it was not made after all, or another run has begun there meanwhile
                made.rmdir()

    @property
    def record(self) -> RunRecord | None:
        """What the instruments wrote, here or in a process that was started for rank 0; None if they got not so far."""
        own = None if self.profiler is None else self.profiler.record
        if own is not None or self.folder is None or not _is_told(self.folder):
            return own
        with suppress(RecordError):
            return read_run(self.folder)
        return None

    def launched(self, **known: Any) -> None:
        """What has become known of how the run is started: fields of its ``Launch``."""
        self.launch = replace(self.launch, **known)
        if self.profiler is not None:
            self.profiler.launched(**known)

    def refuse(self, why: str, remedies: tuple[str, ...], where: Environment, model: ModelFacts | None) -> None:
        """Record that the run was not tried, where, and of what module."""
        failure = Failure(phase="setup", step=None, type="Refused", message=why, remedies=remedies)
        self._record("refused", failure, environment=where, model=model)

    def is_refusal(self, error: BaseException) -> bool:
        """Whether ``error`` says that the call is wrong: ours or Lightning's, before the first step."""
        record = self.record
        begun = record is not None and record.status != "refused"
        return not begun and isinstance(error, (UsageError, MisconfigurationException))

    def ended(self, error: BaseException) -> int:
        """The exit code of a run that a signal or ``sys.exit`` ended."""
        record = self.record
        self._begin_late()
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
        """Keep the traceback beside the record, and the record too where there is none yet; returns the exit code."""
        self._begin_late()
        record = self.record
        if record is None:
            self._record(status_of(error), _failure(error))
        if record is None or record.failure is None:  # otherwise the table has said it
            who = f"rank {self.rank} failed" if self.rank else "failed" if record is not None else "failed in setup"
            say(f"{who}: {said(error)}")
        folder = getattr(self.profiler, "folder", None) or self.folder
        if folder is not None and folder.is_dir():  # a node that shares no disk may have none
            path = folder / (f"traceback.rank{self.rank}.txt" if self.rank else "traceback.txt")
            path.write_text(well_formed("".join(traceback.format_exception(error))), encoding="utf-8")
            say(f"traceback in {from_here(path)}")
        return INTERRUPTED if record is not None and record.status == "interrupted" else FAILED

    def last_words(self, why: str, number: int, lost: int) -> int:
        """Keep what there is, from another thread than the main one, which is stuck; returns the exit code.

        Args:
            why: what has happened.
            number: of the signal that it was; 0 for none.
            lost: which of the ranks that this process started has ended, counted from 1; 0 for none.
        """
        status: Status = "interrupted" if number else "failed"
        if self.profiler is None or not self.profiler.last_words(status, why, followed=not number):
            failure = Failure(phase="setup", step=None, type="Stuck", message=why)
            if lost:  # it knew of no folder yet
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
        if folder is None or _is_told(folder):
            return
        if launch.config_yaml is not None:
            write_whole(folder / "config.yaml", launch.config_yaml)
        record = RunRecord(**launch.facts(), status=status, failure=failure, verb=self.verb, **known)
        record.write(folder / "run.json")
        # The record stands without.
        try_or_note("HPARAMS in TensorBoard", lambda: write_hparams(Entry(folder, record)), [])


def _is_told(folder: Path) -> bool:
    """Whether a record says how the run ended; one that says ``unfinished`` does not."""
    try:
        return read_run(folder).status != "unfinished"
    except RecordError:
        return (folder / "run.json").exists()


def _failure(error: BaseException) -> Failure:
    return Failure(phase="setup", step=None, type=type(error).__name__, message=first_line(error))
