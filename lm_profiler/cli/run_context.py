"""The run of one call as the command line sees it: its folder, the record of a failure, its exit code, its ranks."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import distributed
from torch.multiprocessing.spawn import ProcessException, ProcessExitedException, ProcessRaisedException

from lm_profiler.analysis.conclude import as_far_as_it_came
from lm_profiler.callbacks import TrainingProfiler
from lm_profiler.callbacks.failures import status_of
from lm_profiler.callbacks.instruments.profiling_options import Launch
from lm_profiler.cli.endings import handled, terminate
from lm_profiler.cli.surroundings import quiet
from lm_profiler.lightning_names import LAUNCHED_BY, LAUNCHER, RUNS_RANK, START_METHOD
from lm_profiler.measure.boundary import first_line, said, say, try_or_note
from lm_profiler.record.calls import FAILED, INTERRUPTED, OK
from lm_profiler.record.entry import Entry
from lm_profiler.record.files import claim_run_dir, from_here, if_readable, write_whole
from lm_profiler.record.rank_ends import RankEnd, first_end, read_ends
from lm_profiler.record.run_record import (
    Environment,
    Failure,
    ModelFacts,
    RunRecord,
    Status,
    Verb,
    read_run,
)
from lm_profiler.record.secrets import masked_text
from lm_profiler.record.steps import read_rows
from lm_profiler.record.text import well_formed
from lm_profiler.report.run.run_page import failure_lines
from lm_profiler.tensorboard.summary import write_hparams
from lm_profiler.usage_error import UsageError

_LEAVING_S = 5.0  # seconds for ranks to end by themselves once this process's run is over
_ASKED_S = 20.0  # seconds for ranks to write their progress once they were asked to end


def local_rank() -> int:
    """Return this process's number on its machine, as known before a Trainer exists."""
    return int(os.environ.get("LOCAL_RANK", 0))


class RunContext:
    """What the command line knows of a run, which may fail before it begins. Nothing is on disk before ``begin``."""

    def __init__(self, verb: Verb, launch: Launch, log_dir: str) -> None:
        self.verb = verb
        self.launch = launch
        self.profiler: TrainingProfiler | None = None  # it writes the record once it is set up
        self.rank: int | None = None
        self.folder: Path | None = None  # claimed by rank 0 alone
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

    def _begin_without_trainer(self) -> None:
        """Claim the folder if no Trainer could be built; the launcher's variables give the rank."""
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
            with suppress(OSError):  # the folder was not made, or another run has begun in it
                made.rmdir()

    @property
    def record(self) -> RunRecord | None:
        """The record that the instruments wrote, here or in a process started for rank 0; None before they did."""
        own = None if self.profiler is None else self.profiler.record
        if own is not None or self.folder is None or not _has_final_record(self.folder):
            return own
        return if_readable(read_run, self.folder)

    def launched(self, **known: Any) -> None:
        """Add newly known facts about the start of the run: fields of its ``Launch``."""
        self.launch = replace(self.launch, **known)
        if self.profiler is not None:
            self.profiler.launched(**known)

    def refuse(self, why: str, remedies: tuple[str, ...], where: Environment, model: ModelFacts | None) -> None:
        """Record that the run was refused, why, on which machine, and for which module."""
        failure = Failure(phase="setup", step=None, type="Refused", message=why, remedies=remedies)
        self._record("refused", failure, environment=where, model=model)

    def is_refusal(self, error: BaseException) -> bool:
        """Whether ``error``, ours or Lightning's, came before the first step, which means a wrong call."""
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
        rank = self.rank
        if isinstance(error, ProcessException):  # from a forked or spawned rank
            rank = (rank or 0) + error.error_index
            if getattr(error, "exit_code", None) == INTERRUPTED:
                return self.ended(KeyboardInterrupt())
            self._rank_ended(rank, error)
        record = self.record
        if record is None:
            self._record(status_of(error), _failure(error))
        if record is None or record.failure is None:  # otherwise the table at the run's end has printed it
            who = f"rank {rank} failed" if rank else "failed" if record is not None else "failed in setup"
            say(f"{who}: {said(error)}")
        folder = getattr(self.profiler, "folder", None) or self.folder
        if folder is not None and folder.is_dir():  # a node without a shared disk may have none
            path = folder / (f"traceback.rank{rank}.txt" if rank else "traceback.txt")
            text = masked_text("".join(traceback.format_exception(error)))
            path.write_text(well_formed(text), encoding="utf-8")
            say(f"traceback in {from_here(path)}")
        return INTERRUPTED if record is not None and record.status == "interrupted" else FAILED

    def _rank_ended(self, rank: int, error: ProcessException) -> None:
        """Record that ``rank``, which this process has started, has ended badly.

        A rank that left no end was killed, and the other ranks ended because of that: also by the signal that torch
        then sends them, which is not an interruption of the run.
        """
        folder = self.folder
        if folder is None:
            return
        ends, failure = read_ends(folder), _failure(error).model_copy(update={"rank": rank, "host": platform.node()})
        if not isinstance(error, ProcessExitedException):  # the rank raised, perhaps before it knew the folder
            ends.setdefault(rank, RankEnd(status="failed", failure=failure, at=0.0))
        elif not ends:
            ends[-1] = RankEnd(status="failed", failure=failure, at=0.0, followed=True)
        cause = first_end(ends, [rank], {rank: getattr(error, "exit_code", 1)}) or ends[min(ends)]
        if (record := self.record) is None:
            self._record(cause.status, cause.failure)
        else:
            record.model_copy(update={"status": cause.status, "failure": cause.failure}).write(folder / "run.json")
        if (record := self.record) is not None:
            say(f"{failure_lines(record)[0]}; written to {from_here(folder)}")

    def _record(self, status: Status, failure: Failure, **known: Any) -> None:
        folder, launch = self.folder, self.launch
        if folder is None or _has_final_record(folder):
            return
        if (folder / "run.json").exists():  # a rank began the record, and none could complete it
            begun = read_run(folder).model_copy(update={"status": status, "failure": failure})
            record = as_far_as_it_came(begun, read_rows(folder, growing=True))
        else:
            if launch.config_yaml is not None:
                write_whole(folder / "config.yaml", launch.config_yaml)
            record = RunRecord(**launch.facts(), status=status, failure=failure, verb=self.verb, **known)
        record.write(folder / "run.json")
        # The record is complete without HPARAMS, so a failure here is a note.
        try_or_note("HPARAMS in TensorBoard", lambda: write_hparams(Entry(folder, record)), [])


def _has_final_record(folder: Path) -> bool:
    """Whether the folder holds a record of how the run ended; an ``unfinished`` one is not."""
    record = if_readable(read_run, folder)
    return (folder / "run.json").exists() if record is None else record.status != "unfinished"


def _failure(error: BaseException) -> Failure:
    kind, message = type(error).__name__, first_line(error)
    if isinstance(error, ProcessRaisedException):  # its text is the rank's traceback
        kind, _, message = masked_text(str(error)).rstrip().splitlines()[-1].partition(": ")
    return Failure(phase="setup", step=None, type=kind.rpartition(".")[2], message=message)


class RankLauncher(LAUNCHER.as_base()):  # type: ignore[misc]  # a private class, looked up at run time
    """Lightning's multiprocessing launcher, whose ranks end as ranks of the command line do.

    Lightning calls ``on_exception`` only in the process that called the launcher, where no step runs.
    """

    def _wrapping_function(self, process_idx: int, trainer: Trainer | None, *args: Any) -> None:
        with quiet(), handled({signal.SIGTERM: terminate}):
            try:
                super()._wrapping_function(process_idx, trainer, *args)
            except BaseException as error:
                for number in (signal.SIGTERM, signal.SIGINT):  # this rank is ending already
                    signal.signal(number, signal.SIG_IGN)
                for each in getattr(trainer, "callbacks", ()):
                    if trainer is not None and isinstance(each, TrainingProfiler):
                        each.on_exception(trainer, trainer.lightning_module, error)
                if isinstance(error, KeyboardInterrupt):
                    sys.exit(INTERRUPTED)  # torch would end the rank as if it had succeeded
                raise
            finally:
                leave_group()


def take_over(trainer: Trainer) -> None:
    """Replace ``trainer``'s multiprocessing launcher, if it has one, by ``RankLauncher``."""
    strategy, launcher = trainer.strategy, trainer.strategy.launcher
    method = START_METHOD.of_or(launcher)
    if type(launcher) is LAUNCHER.find_or(None) and method is not None and RUNS_RANK.of_or(launcher) is not None:
        setattr(strategy, LAUNCHED_BY.name, RankLauncher(strategy, method))


def leave_group() -> None:
    """Destroy the process group: Gloo's threads may abort a process that ends before them (pytorch issue 190489)."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def end_ranks(trainer: Trainer | None, ask: bool = False, leaving_s: float = _LEAVING_S) -> None:
    """Wait for the ranks that Lightning started, asking them to end if ``ask``; kill those that do not end."""
    if distributed.is_available() and distributed.is_initialized() and distributed.get_backend() == "gloo":
        leave_group()  # ranks that wait for this one see that it has gone; NCCL would wait for the others
    launcher = trainer.strategy.launcher if trainer is not None else None
    processes = getattr(launcher, "procs", [])
    children = list(processes)
    processes.clear()  # otherwise Lightning's observer kills this process too once one of them fails
    until = time.monotonic() + (_ASKED_S if ask else leaving_s)
    try:
        for child in children if ask else ():
            child.terminate()
        for child in children:
            _wait(child, max(until - time.monotonic(), 0.0))
    finally:
        for child in children:
            child.kill()
            _wait(child)


def _wait(child: subprocess.Popen[bytes] | BaseProcess, timeout: float | None = None) -> None:
    with suppress(subprocess.TimeoutExpired):
        child.join(timeout) if isinstance(child, BaseProcess) else child.wait(timeout)
