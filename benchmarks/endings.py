"""What is left of a run of two ranks, whichever fails and however: ``python -m benchmarks.endings``.

Each ending is a call of the command line in processes of its own, whose ranks sleep through their steps. What the
ranks finished is noted by the module itself, so that the rows that were kept can be held against it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

LAST = 40
"""The step in which it happens."""

STEP_S = 0.05
_PATIENCE_S = 120.0
_MARK = "LM_PROFILER_ENDING"


class Ends(LightningModule):
    """Rank ``who`` ends in ``way`` in the forward pass of step ``LAST``; the others wait for it in backward."""

    def __init__(
        self, way: str = "", who: int = 1, batches: int = 100_000, fewer: int = 0
    ) -> None:
        super().__init__()
        self.way, self.who, self.batches, self.fewer = way, who, batches, fewer
        self.layer = nn.Linear(8, 8)
        self.done = 0
        if way.startswith("build_") and int(os.environ.get("LOCAL_RANK", 0)) == who:
            getattr(self, f"_{way.removeprefix('build_')}")()

    def setup(self, stage: str) -> None:
        if self.way.startswith("setup_") and self.global_rank == self.who:
            getattr(self, f"_{self.way.removeprefix('setup_')}")()

    def train_dataloader(self) -> DataLoader[Any]:
        count = self.batches - self.fewer * (self.global_rank == 1)
        return DataLoader([torch.zeros(8)] * count, batch_size=1)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(STEP_S)
        step = batch_idx + 1
        if step == LAST:
            Path(f"pid.{self.global_rank}").write_text(
                str(os.getpid()), encoding="utf-8"
            )
        if step == LAST and self.global_rank == self.who:
            getattr(self, f"_{self.way}", lambda: None)()
        return self.layer(batch).sum()  # type: ignore[no-any-return]

    def on_train_batch_end(self, *_: Any) -> None:
        self.done += 1
        Path(f"done.{self.global_rank}").write_text(str(self.done), encoding="utf-8")

    def _raise(self) -> None:
        raise ValueError("boom")

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _hang(self) -> None:
        time.sleep(1e4)

    def _stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _exit(self) -> None:
        sys.exit(3)


class Case(NamedTuple):
    """A signal, where there is one, goes to the rank ``to`` or to the whole group, ``late_s`` after it happened."""

    way: str
    who: int
    number: int = 0
    to: str = ""
    late_s: float = 0.0
    options: tuple[str, ...] = ()


_LIMIT = (
    "--trainer.strategy=lightning.pytorch.strategies.DDPStrategy",
    "--trainer.strategy.init_args.timeout=0:1:0",
)
CASES: dict[str, Case] = {
    **{f"rank {who} raises": Case("raise", who) for who in (0, 1)},
    "rank 1 raises while it is built": Case("build_raise", 1),
    "kill -9 rank 1 while it is built": Case("build_kill", 1),
    **{f"rank {who} raises in setup": Case("setup_raise", who) for who in (0, 1)},
    **{f"kill -9 rank {who} in setup": Case("setup_kill", who) for who in (0, 1)},
    **{f"rank {who} sys.exit(3)": Case("exit", who) for who in (0, 1)},
    **{f"kill -9 rank {who}": Case("kill", who) for who in (0, 1)},
    **{
        f"rank {who} hangs, limit 60 s": Case("hang", who, options=_LIMIT)
        for who in (0, 1)
    },
    "rank 1 stopped, limit 60 s": Case("stop", 1, options=_LIMIT),
    **{
        f"{name} to {to}": Case("", 1, number, to)
        for name, number in (("SIGTERM", signal.SIGTERM), ("SIGINT", signal.SIGINT))
        for to in ("0", "1", "all")
    },
    **{
        f"SIGTERM to {to}, rank {who} hangs": Case("hang", who, signal.SIGTERM, to, 1.0)
        for to, who in (("0", 1), ("all", 1), ("all", 0))
    },
    "SIGINT to all, rank 1 hangs": Case("hang", 1, signal.SIGINT, "all", 1.0),
    "rank 1 has 10 batches fewer": Case(
        "",
        1,
        options=("--trainer.max_epochs=1", "--model.batches=60", "--model.fewer=10"),
    ),
}


def run(case: Case, folder: Path) -> dict[str, Any]:
    """What came of it."""
    model = [f"--model.way={case.way}", f"--model.who={case.who}"] if case.way else []
    strategy = (
        case.options[:2]
        if case.options[:1] == _LIMIT[:1]
        else ("--trainer.strategy=ddp",)
    )
    command = [
        sys.executable,
        "-m",
        "lm_profiler",
        "fit",
        "--model=benchmarks.endings.Ends",
        *model,
    ]
    command += [
        "--trainer.accelerator=cpu",
        "--trainer.devices=2",
        *strategy,
        "--name=run",
    ]
    command += [
        "--stages.warmup_steps=2",
        "--stages.measure_steps=1000",
        "--trainer.use_distributed_sampler=false",
    ]
    command += [option for option in case.options if option not in strategy]
    environment = {
        **os.environ,
        _MARK: str(folder),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path.cwd()),
    }
    said = folder / "said.txt"
    with said.open("w") as out:
        started = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _wait(
        lambda: (
            started.poll() is not None
            or all((folder / f"pid.{rank}").exists() for rank in (0, 1))
        ),
        120,
    )
    began = time.monotonic()
    if case.number and started.poll() is None:
        time.sleep(case.late_s + 0.02)
        if case.to == "all":
            os.killpg(started.pid, case.number)
        else:
            os.kill(
                int((folder / f"pid.{case.to}").read_text(encoding="utf-8")),
                case.number,
            )
    code: int | str
    try:
        code = started.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        code = "hangs"
    ended_s = time.monotonic() - began
    _wait(lambda: not _left(folder), 20)
    left = _left(folder)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    started.wait()
    return {
        "code": code,
        "s": round(ended_s, 1),
        **_found(folder),
        "orphans": len(left),
        "said": _said(said),
    }


def _found(folder: Path) -> dict[str, Any]:
    from lm_profiler.record.run_record import read_run
    from lm_profiler.record.steps import read_steps

    runs = sorted((folder / "logs" / "run").glob("version_*"))
    done = {
        rank: int((folder / f"done.{rank}").read_text() or 0)
        for rank in (0, 1)
        if (folder / f"done.{rank}").exists()
    }
    if not runs:
        return {"folders": 0}
    try:
        record = read_run(runs[0])
    except Exception as error:
        return {"folders": len(runs), "record": str(error)}
    kept: dict[int, set[int]] = {0: set(), 1: set()}
    for file in runs[0].rglob("steps*.csv"):
        with suppress(Exception):
            for row in read_steps(file):
                kept[row.rank].add(row.step)
    failure = record.failure
    return {
        "folders": len(runs),
        "status": record.status,
        "failure": None
        if failure is None
        else f"{failure.where}: {failure.type}: {failure.message}"[:160],
        "kept": {rank: f"{len(kept[rank])} of {done.get(rank)}" for rank in kept},
        "files": sorted(
            str(file.relative_to(runs[0]))
            for file in runs[0].rglob("*")
            if "tfevents" not in file.name
        ),
    }


def _said(file: Path) -> list[str]:
    return [
        line[:200]
        for line in file.read_text(errors="replace").splitlines()
        if line.startswith("lm_profiler:")
    ]


def _left(folder: Path) -> list[int]:
    wanted = f"{_MARK}={folder}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (process / "environ").read_bytes().split(
                b"\0"
            ) and not _is_dead(process):
                found.append(int(process.name))
    return found


def _is_dead(process: Path) -> bool:
    return (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"


def _wait(until: Callable[[], bool], patience_s: float) -> None:
    end = time.monotonic() + patience_s
    while not until() and time.monotonic() < end:
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="endings whose name contains this")
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    # whoever started this in the background has it ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, case in CASES.items():
        for _ in range(given.rounds if given.only in name else 0):
            with tempfile.TemporaryDirectory() as folder:
                print(
                    name, json.dumps(run(case, Path(folder)), indent=None), flush=True
                )


if __name__ == "__main__":
    main()
