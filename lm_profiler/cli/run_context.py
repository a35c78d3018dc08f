"""The run of one call of the command line: its folder, the record of a failure, its exit code, its ranks."""

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
from torch.multiprocessing.spawn import (
    ProcessException,
    ProcessExitedException,
    ProcessRaisedException,
)

from lm_profiler.analysis.conclude import with_figures_of_recorded_steps
from lm_profiler.callbacks import TrainingProfiler
from lm_profiler.callbacks.failures import status_of
from lm_profiler.callbacks.instruments.profiling_options import Launch
from lm_profiler.cli.endings import handled, terminate
from lm_profiler.cli.surroundings import quiet
from lm_profiler.lightning_names import LAUNCHED_BY, LAUNCHER, RUNS_RANK, START_METHOD
from lm_profiler.measure.boundary import (
    error_text,
    first_line,
    print_message,
    try_or_note,
)
from lm_profiler.record.calls import FAILED, INTERRUPTED, OK
from lm_profiler.record.entry import Entry
from lm_profiler.record.files import (
    claim_run_dir,
    none_if_unreadable,
    relative_to_cwd,
    write_whole,
)
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
from lm_profiler.record.secrets import mask_text
from lm_profiler.record.steps import read_rows
from lm_profiler.record.text import well_formed
from lm_profiler.report.run.run_page import failure_lines
from lm_profiler.tensorboard.summary import write_hparams
from lm_profiler.usage_error import UsageError

_NO_RANK = -1  # stands for the rank of an end that no rank has written to a file
# seconds in which ranks may end by themselves after the run of this process has ended
_LEAVING_S = 5.0
# seconds in which ranks may write their progress after SIGTERM
_WRITING_S = 20.0


def local_rank() -> int:
    """Return the rank of this process on its machine, from the launcher's variable, before a Trainer exists."""
    return int(os.environ.get("LOCAL_RANK", 0))


class RunContext:
    """What the command line knows about a run, which may fail before it begins. ``begin`` is the first to write
    files."""

    def __init__(self, verb: Verb, launch: Launch, log_dir: str) -> None:
        self.verb = verb
        self.launch = launch
        # the callback, which writes the record once it is set up
        self.profiler: TrainingProfiler | None = None
        self.rank: int | None = None
        self.folder: Path | None = None  # only of rank 0, which claims it
        self._parent = Path(log_dir, launch.name)
        self._new_folders: list[Path] = []

    def begin(self, rank: int) -> None:
        """Claim the run's folder if ``rank``, counted over all processes of the run, is 0.

        Raises:
            UsageError: the folder cannot be created.
        """
        self.rank = rank
        if rank > 0:
            return
        for folder in (self._parent, *self._parent.parents):
            if not os.path.exists(folder):  # noqa: PTH110 - Path's raises for some
                self._new_folders.append(folder)
        try:
            self.folder = claim_run_dir(self._parent)
        except OSError as error:
            self._remove_new_folders()
            raise UsageError(
                f"log_dir: cannot write to {self._parent} ({error.strerror}); choose another folder with --log_dir"
            ) from None

    def _begin_without_trainer(self) -> None:
        """Claim the folder if no Trainer was built; the rank is read from the launcher's variables."""
        if self.rank is not None:
            return
        rank_on_node = getattr(rank_zero_only, "rank", 0)
        node_rank = int(os.environ.get("NODE_RANK", 0))
        # This is 0 only in the first process of all. For any other process, it only matters that it is above 0.
        rank = rank_on_node or node_rank
        # The run has failed already: if its folder cannot be created as well, that must not hide why.
        with suppress(UsageError):
            self.begin(rank)

    def discard(self) -> None:
        """Remove the folder of a run that never began; a recorded run keeps its folder."""
        if self.folder is None or _has_final_record(self.folder):
            return
        # The folder was claimed as a new one, so it holds only what this call has written.
        shutil.rmtree(self.folder)
        self.folder = None
        # Parent folders that this call created are removed too if they are empty.
        self._remove_new_folders()

    def _remove_new_folders(self) -> None:
        for folder in self._new_folders:
            with suppress(OSError):
                # It fails if the folder was not created, or if another run has begun in it.
                folder.rmdir()

    def read_record(self) -> RunRecord | None:
        """Return the record that the instruments wrote, here or in the process of rank 0; None if there is none yet."""
        if self.profiler is not None and self.profiler.record is not None:
            return self.profiler.record
        if self.folder is None or not _has_final_record(self.folder):
            return None
        return none_if_unreadable(read_run, self.folder)

    def add_launch_facts(self, **facts: Any) -> None:
        """Add newly known facts about the start of the run: fields of its ``Launch``."""
        self.launch = replace(self.launch, **facts)
        if self.profiler is not None:
            self.profiler.launched(**facts)

    def refuse(
        self,
        reason: str,
        remedies: tuple[str, ...],
        machine: Environment,
        model: ModelFacts | None,
    ) -> None:
        """Write a record of the refused run: the reason, settings that would fit, the machine and the module."""
        failure = Failure(
            phase="setup", step=None, type="Refused", message=reason, remedies=remedies
        )
        self._record("refused", failure, environment=machine, model=model)

    def is_refusal(self, error: BaseException) -> bool:
        """Return whether ``error``, which was raised before the first step, means that the call is wrong."""
        record = self.read_record()
        has_begun = record is not None and record.status != "refused"
        return not has_begun and isinstance(
            error, (UsageError, MisconfigurationException)
        )

    def on_exit(self, error: BaseException) -> int:
        """Return the exit code of a run that a signal or ``sys.exit`` ended.

        If the run was interrupted before there was a record, the record is written here.
        """
        record = self.read_record()
        # If Ctrl-C came before there was a Trainer, the folder is not claimed yet, but the record needs it.
        self._begin_without_trainer()
        interrupt = interrupt_in(error)
        if interrupt is not None:
            if record is None and not self.rank:
                self._record_early_interrupt(interrupt)
            return INTERRUPTED
        if not isinstance(error, SystemExit):
            return FAILED
        if error.code is None:
            return OK
        return error.code if isinstance(error.code, int) else FAILED

    def _record_early_interrupt(self, interrupt: KeyboardInterrupt) -> None:
        """Record and print that the run was interrupted before its first step."""
        self._record("interrupted", _failure_in_setup(interrupt))
        message = "interrupted before the first step"
        if self.folder is not None:
            message += f"; written to {relative_to_cwd(self.folder)}"
        print_message(message)

    def on_failure(self, error: Exception) -> int:
        """Write the traceback, and a record if there is none; return the exit code."""
        self._begin_without_trainer()
        rank = self.rank or 0
        if isinstance(error, ProcessException):  # from a forked or spawned rank
            rank += error.error_index
            if getattr(error, "exit_code", None) == INTERRUPTED:
                return self.on_exit(KeyboardInterrupt())
            self._record_rank_failure(rank, error)
        record = self.read_record()
        if record is None:
            self._record(status_of(error), _failure_in_setup(error))
        if record is None or record.failure is None:
            # Otherwise the table at the end of the run has shown the failure.
            if rank:
                print_message(f"rank {rank} failed: {error_text(error)}")
            elif record is None:
                print_message(f"failed in setup: {error_text(error)}")
            else:
                print_message(f"failed: {error_text(error)}")
        self._write_traceback(error, rank)
        was_interrupted = record is not None and record.status == "interrupted"
        return INTERRUPTED if was_interrupted else FAILED

    def _write_traceback(self, error: Exception, rank: int) -> None:
        """Write the traceback of ``error``, without secrets, into the run's folder, and print its path."""
        folder = getattr(self.profiler, "folder", None) or self.folder
        if folder is None or not folder.is_dir():
            # A node without a shared disk may not have the folder.
            return
        file_name = f"traceback.rank{rank}.txt" if rank else "traceback.txt"
        text = mask_text("".join(traceback.format_exception(error)))
        path = folder / file_name
        path.write_text(well_formed(text), encoding="utf-8")
        print_message(f"traceback in {relative_to_cwd(path)}")

    def _record_rank_failure(self, rank: int, error: ProcessException) -> None:
        """Record the failure of ``rank``, which this process has started.

        A rank that left no file about its end was killed, and the other ranks ended because of that. The signal that
        torch then sends them is not an interruption of the run.
        """
        folder = self.folder
        if folder is None:
            return
        cause = self._cause_of_end(rank, error, folder)
        recorded = self.read_record()
        if recorded is None:
            self._record(cause.status, cause.failure)
        else:
            with_cause = recorded.model_copy(
                update={"status": cause.status, "failure": cause.failure}
            )
            with_cause.write(folder / "run.json")
        written = self.read_record()
        if written is not None:
            print_message(
                f"{failure_lines(written)[0]}; written to {relative_to_cwd(folder)}"
            )

    def _cause_of_end(
        self, rank: int, error: ProcessException, folder: Path
    ) -> RankEnd:
        """Return the end that caused the other ranks to end, given the ``error`` that ended ``rank``."""
        ends = read_ends(folder)
        failure = _failure_in_setup(error).model_copy(
            update={"rank": rank, "host": platform.node()}
        )
        if not isinstance(error, ProcessExitedException):
            # The rank raised an exception, perhaps before it knew the folder.
            ends.setdefault(rank, RankEnd(status="failed", failure=failure, at=0.0))
        elif not ends:
            ends[_NO_RANK] = RankEnd(
                status="failed", failure=failure, at=0.0, followed=True
            )
        exit_codes = {rank: getattr(error, "exit_code", 1)}
        cause = first_end(ends, [rank], exit_codes)
        assert cause is not None  # ``ends`` is not empty
        return cause

    def _record(self, status: Status, failure: Failure, **facts: Any) -> None:
        """Write the record of the run with further ``facts``, unless there already is one about how it ended."""
        folder, launch = self.folder, self.launch
        if folder is None or _has_final_record(folder):
            return
        if (folder / "run.json").exists():
            # A rank has begun the record, but none could complete it.
            unfinished = read_run(folder).model_copy(
                update={"status": status, "failure": failure}
            )
            record = with_figures_of_recorded_steps(
                unfinished, read_rows(folder, growing=True)
            )
        else:
            if launch.config_yaml is not None:
                write_whole(folder / "config.yaml", launch.config_yaml)
            record = RunRecord(
                **launch.facts(),
                status=status,
                failure=failure,
                verb=self.verb,
                **facts,
            )
        record.write(folder / "run.json")
        # The record is complete without HPARAMS, so a failure here is only noted.
        try_or_note(
            "HPARAMS in TensorBoard", lambda: write_hparams(Entry(folder, record)), []
        )


def _has_final_record(folder: Path) -> bool:
    """Return whether the folder has a record of how the run ended. An ``unfinished`` record does not count."""
    record = none_if_unreadable(read_run, folder)
    if record is None:
        return (folder / "run.json").exists()
    return record.status != "unfinished"


def interrupt_in(error: BaseException) -> KeyboardInterrupt | None:
    """Return the interrupt that ``error`` is, or that Lightning turned into ``error``; None if there was none."""
    interrupt = error if isinstance(error, KeyboardInterrupt) else error.__context__
    return interrupt if isinstance(interrupt, KeyboardInterrupt) else None


def _failure_in_setup(error: BaseException) -> Failure:
    """Return ``error`` as a failure in the set-up, for the record."""
    type_name, message = type(error).__name__, first_line(error)
    if isinstance(error, ProcessRaisedException):
        # Its text is the traceback of the rank.
        last_line = mask_text(str(error)).rstrip().splitlines()[-1]
        type_name, _, message = last_line.partition(": ")
    return Failure(
        phase="setup", step=None, type=type_name.rpartition(".")[2], message=message
    )


class RankLauncher(LAUNCHER.as_base()):  # type: ignore[misc]  # a private class, looked up at run time
    """Lightning's multiprocessing launcher, with ranks that end in the same way as ranks of the command line.

    Lightning itself would call ``on_exception`` only in the process that called the launcher, where no step runs.
    """

    def _wrapping_function(
        self, process_idx: int, trainer: Trainer | None, *args: Any
    ) -> None:
        """Run the function of a rank; if it fails, notify our callback; in any case leave the process group."""
        with quiet(), handled({signal.SIGTERM: terminate}):
            try:
                super()._wrapping_function(process_idx, trainer, *args)
            except BaseException as error:
                for number in (signal.SIGTERM, signal.SIGINT):
                    # This rank is already ending.
                    signal.signal(number, signal.SIG_IGN)
                for callback in getattr(trainer, "callbacks", ()):
                    if trainer is not None and isinstance(callback, TrainingProfiler):
                        callback.on_exception(trainer, trainer.lightning_module, error)
                if isinstance(error, KeyboardInterrupt):
                    # Torch would end the rank with exit code 0.
                    sys.exit(INTERRUPTED)
                raise
            finally:
                leave_group()


def replace_launcher(trainer: Trainer) -> None:
    """Replace the multiprocessing launcher of ``trainer``, if it has one, by a ``RankLauncher``."""
    strategy, launcher = trainer.strategy, trainer.strategy.launcher
    if type(launcher) is not LAUNCHER.find_or(None):
        return
    start_method = START_METHOD.get_or(launcher)
    if start_method is not None and RUNS_RANK.get_or(launcher) is not None:
        setattr(strategy, LAUNCHED_BY.name, RankLauncher(strategy, start_method))


def leave_group() -> None:
    """Destroy the process group: Gloo's threads may abort a process that ends before them (pytorch issue 190489)."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def end_ranks(
    trainer: Trainer | None,
    terminate_first: bool = False,
    leaving_s: float = _LEAVING_S,
) -> None:
    """Wait for the ranks that Lightning started, and kill those that do not end in time.

    With ``terminate_first`` they get SIGTERM first, and time to write their progress.
    """
    has_group = distributed.is_available() and distributed.is_initialized()
    if has_group and distributed.get_backend() == "gloo":
        # Ranks that wait for this one notice that it has left. With NCCL, leaving would wait for the other ranks.
        leave_group()
    launcher = trainer.strategy.launcher if trainer is not None else None
    processes = getattr(launcher, "procs", [])
    children = list(processes)
    processes.clear()  # Otherwise Lightning's observer would kill this process too if one of them fails.
    limit_s = _WRITING_S if terminate_first else leaving_s
    deadline = time.monotonic() + limit_s
    try:
        if terminate_first:
            for child in children:
                child.terminate()
        for child in children:
            seconds_left = max(deadline - time.monotonic(), 0.0)
            _wait(child, seconds_left)
    finally:
        for child in children:
            child.kill()
            _wait(child)


def _wait(
    child: subprocess.Popen[bytes] | BaseProcess, timeout: float | None = None
) -> None:
    """Wait for the end of ``child``, at most ``timeout`` seconds."""
    with suppress(subprocess.TimeoutExpired):
        if isinstance(child, BaseProcess):
            child.join(timeout)
        else:
            child.wait(timeout)
