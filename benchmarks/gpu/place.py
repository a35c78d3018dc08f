"""Where a part runs: its folder, device and time, and calls of the command line in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch

from benchmarks.sweep import TINY
from lm_profiler.cli.main import main
from lm_profiler.processes.child import end_text
from lm_profiler.record.entry import Entry, collect
from lm_profiler.record.run_record import RecordError, RunRecord, read_run

_SPARE_SHARE = 0.1
"""Of the limit; what a part may need to write what it has found."""

_PATIENCE_S = 2.0
"""For a process that was told to end because the time is over: a run writes its record, a sweep ends its cells."""

TINY_ATTENTION = (
    "--data.batch_size=1",
    "--stages.warmup_steps=1",
    "--stages.measure_steps=3",
)
"""What makes configs/attention.yaml quick on the CPU."""


@dataclass(frozen=True)
class Place:
    """Of one part.

    Args:
        folder: All that the part writes.
        on_cpu: The same code with tiny sizes and no GPU, to try the command itself.
        limit_s: Seconds after its beginning at which the part is killed.
    """

    folder: Path
    on_cpu: bool
    limit_s: float
    began_s: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds in which new work may still begin."""
        return self.began_s + self.limit_s * (1 - _SPARE_SHARE) - time.monotonic()

    @property
    def accelerator(self) -> str:
        """Lightning's name."""
        return "cpu" if self.on_cpu else "gpu"

    @property
    def device(self) -> torch.device:
        """Asking it of a GPU touches CUDA, after which ``apart`` is of no use."""
        return (
            torch.device("cpu")
            if self.on_cpu
            else torch.device("cuda", torch.cuda.current_device())
        )

    def sized(self, *options: str, tiny: Sequence[str] = TINY) -> tuple[str, ...]:
        """Options of a run on one device: on the CPU ``tiny`` has the last word."""
        one = (f"--trainer.accelerator={self.accelerator}", "--trainer.devices=1")
        return (*options, *one, *(tiny if self.on_cpu else ()))

    def apart(
        self, *works: Callable[[], int | None], output: str, at_least_s: float = 0.0
    ) -> list[int | None]:
        """Do each of ``works`` in a copy of this process, which must not have touched CUDA, all at the same time.

        What they print is added to the file ``output``. Returns their exit codes, negative for a signal; None of one
        that was killed because the time was over, which is not before ``at_least_s`` from now.
        """
        context = multiprocessing.get_context("fork")
        processes = [
            context.Process(target=_alone, args=(work, self.folder / output))
            for work in works
        ]
        for process in processes:
            process.start()
        codes = [self._ended(process, at_least_s) for process in processes]
        with (self.folder / output).open("a") as file:
            file.writelines(f"{how_told(code)}\n" for code in codes if code != 0)
        return codes

    def _ended(self, process: ForkProcess, at_least_s: float) -> int | None:
        process.join(max(self.left_s, at_least_s))
        if not process.is_alive():
            return process.exitcode
        process.terminate()
        process.join(_PATIENCE_S)
        process.kill()
        process.join()
        return None

    def call(self, *arguments: str, output: str, at_least_s: float = 0.0) -> int | None:
        """The exit code of ``lm_profiler`` with these arguments; what it prints is kept in the part's folder."""

        def work() -> int:
            sys.argv = ["lm_profiler", *arguments]
            return main(arguments)

        return self.apart(work, output=output, at_least_s=at_least_s)[0]

    def picture(self, runs: Path, kind: str) -> None:
        """A plot of the runs below a folder; quickly done, so it is given time when all other is over."""
        file = self.folder / f"{kind}.png"
        self.call(
            "report",
            str(runs),
            f"--plot={kind}",
            f"--output={file}",
            output="report.txt",
            at_least_s=4.0,
        )

    def fit(self, name: str, *options: str) -> tuple[int | None, RunRecord | None]:
        """How one run with these options ended, and its record; None where it left none."""
        code = self.call(
            "fit",
            *options,
            f"--log_dir={self.folder}",
            f"--name={name}",
            output=f"{name}.txt",
        )
        return code, self.last(name)

    def last(self, name: str) -> RunRecord | None:
        """The record of the last run of that name."""
        try:
            return read_run(self.newest(name))
        except RecordError:
            return None

    def newest(self, name: str) -> Path:
        """The folder of the last run of that name."""
        runs = sorted(
            (self.folder / name).glob("version_*"),
            key=lambda path: int(path.name.partition("_")[2]),
        )
        return runs[-1] if runs else self.folder / name

    def sweep(self, name: str, *options: str) -> list[Entry]:
        """The cells of a sweep, those that an earlier try has done included; see ``missing``."""
        folder = self.folder / name
        self.call(
            "sweep",
            *options,
            f"--name={name}",
            f"--log_dir={self.folder}",
            output=f"{name}.txt",
        )
        return collect([folder]).entries if folder.exists() else []


def how_told(code: int | None) -> str:
    """The end of a process that ``apart`` has started."""
    return "killed, because the time was over" if code is None else end_text(code)


def missing(entries: Sequence[Entry]) -> bool:
    """Whether a sweep has cells that nobody ran yet, or not to their end, and would go on with them."""
    return any(
        entry.outcome is None or entry.outcome.status == "interrupted"
        for entry in entries
    )


def _alone(work: Callable[[], int | None], output: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with output.open("ab") as file:
        for end in (1, 2):
            os.dup2(file.fileno(), end)
    sys.exit(work() or 0)
