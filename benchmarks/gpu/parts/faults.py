"""What is left of a training that runs out of memory, fails an assertion on the device, or is killed, by phase; and of
one that cannot fit."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.place import Place
from lm_profiler.callbacks import (
    MemoryOptions,
    StageOptions,
    TraceOptions,
    TrainingProfiler,
)
from lm_profiler.record.calls import WRONG_CALL
from lm_profiler.record.run_record import RecordError, RunRecord, read_run
from lm_profiler.record.steps import read_steps

WHOLE = 5
"""Steps before the one that fails."""
WHERE = ("forward", "backward", "optimizer")
STATUS = {"out of memory": "oom", "assertion": "failed", "kill -9": "unfinished"}


def out_of_memory(device: torch.device) -> None:
    torch.empty(1 << 50, dtype=torch.uint8, device=device)


def assertion(device: torch.device) -> None:
    """On CUDA the kernel's own, which the host hears of later; on the CPU an IndexError at once."""
    torch.zeros(1, device=device)[torch.tensor([7], device=device)]


def kill(device: torch.device) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS: dict[str, Callable[[torch.device], None]] = {
    "out of memory": out_of_memory,
    "assertion": assertion,
    "kill -9": kill,
}


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fail: Callable[[], None]) -> Tensor:
        ctx.fail = fail
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.fail()
        return grad, None


class Fails(BoringModel):
    """Its step ``WHOLE + 1`` fails in one phase."""

    def __init__(self, where: str, how: Callable[[torch.device], None]) -> None:
        super().__init__()
        self.where, self.how = where, how
        self.batches = 0

    def fail(self, where: str) -> None:
        if where == self.where and self.batches == WHOLE + 1:
            self.how(self.device)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches += 1
        self.fail("forward")
        loss = self.layer(batch).sum()
        failing: Tensor = FailsInBackward.apply(loss, partial(self.fail, "backward"))  # type: ignore[no-untyped-call]
        return failing

    def configure_optimizers(self) -> Any:
        module = self

        class FailingSGD(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                loss = closure()
                module.fail("optimizer")
                return loss

        return FailingSGD(self.parameters(), lr=0.1)


def train(
    folder: Path, accelerator: str, where: str, how: Callable[[torch.device], None]
) -> int:
    """Ends as a program of a user's does that does not catch the error."""
    stages = StageOptions(warmup_steps=1, measure_steps=20)
    profiler = TrainingProfiler(
        stages,
        MemoryOptions(steps=0),
        TraceOptions(steps=0),
        quiet=True,
        log_dir=folder,
    )
    off: dict[str, Any] = dict.fromkeys(
        (
            "logger",
            "enable_checkpointing",
            "enable_progress_bar",
            "enable_model_summary",
        ),
        False,
    )
    trainer = Trainer(
        accelerator=accelerator,
        devices=1,
        default_root_dir=folder,
        callbacks=[profiler],
        **off,
    )
    try:
        trainer.fit(Fails(where, how))
    except (RuntimeError, IndexError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def run(place: Place, findings: Findings) -> None:
    cases = [
        (name, where)
        for name in FAULTS
        for where in (WHERE if name != "kill -9" else WHERE[1:2])
    ]
    folders = [place.folder / name.replace(" ", "_") / where for name, where in cases]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    works = [
        partial(train, folder, place.accelerator, where, FAULTS[name])
        for folder, (name, where) in zip(folders, cases, strict=True)
    ]
    codes = place.apart(*works, output="faults.txt")
    rows = []
    for folder, (name, where), code in zip(folders, cases, codes, strict=True):
        rows.append([name, where, *left(folder, code)])
        headings = (
            "fault",
            "in",
            "ended",
            "status",
            "phase told",
            "step told",
            "whole steps kept",
        )
        findings.table("What is left", headings, rows, left=5)
    told = [row[3] == STATUS[row[0]] for row in rows]
    findings.aim(
        "faults with the right status", "all", f"{sum(told)} of {len(told)}", all(told)
    )
    exact = [
        row[1:2] == row[4:5] and row[5] == str(WHOLE + 1)
        for row in rows
        if row[0] == "out of memory"
    ]
    findings.aim(
        "out of memory told in its phase and step",
        "all",
        f"{sum(exact)} of {len(exact)}",
        all(exact),
    )
    findings.add(rows=rows)
    refused(place, findings)


def refused(place: Place, findings: Findings) -> None:
    """A run that cannot fit: the device is open when it is asked what would."""
    options = (
        *place.sized("--config=small_bf16"),
        f"--data.batch_size={1 << 22}",
        "--check_memory=true",
    )
    code = place.call(
        "fit",
        *options,
        f"--log_dir={place.folder}",
        "--name=refused",
        output="refused.txt",
    )
    record = place.last("refused")
    status, remedies = (
        ("no record", ()) if record is None else (record.status, _remedies(record))
    )
    found = (
        f"exit code {code}, {status}, would fit: {' or '.join(remedies) or 'nothing'}"
    )
    met = (code, status) == (WRONG_CALL, "refused") and bool(remedies)
    findings.aim("a run that cannot fit", "refused, with what would fit", found, met)


def _remedies(record: RunRecord) -> Sequence[str]:
    return () if record.failure is None else record.failure.remedies


def left(folder: Path, code: int | None) -> list[str]:
    """How the process ended, and what its run tells."""
    ended = "its time was over" if code is None else str(code)
    run_folder = next(
        iter(sorted(folder.rglob("run.json"))), folder / "run.json"
    ).parent
    try:
        record = read_run(run_folder)
    except RecordError as error:
        return [ended, str(error), "", "", ""]
    try:
        kept = str(
            len(read_steps(run_folder / "steps.csv", record.status == "unfinished"))
        )
    except RecordError:
        kept = "0"
    failure = record.failure
    return [
        ended,
        record.status,
        *(("", "") if failure is None else (failure.phase, str(failure.step))),
        kept,
    ]
