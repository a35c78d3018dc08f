"""`improve` on real programs of this machine, each gain measured again by runs that it knows nothing of.

    python -m benchmarks.improve_real [--cases loader,nothing,small] [--budget 10m] [--pairs 4]

`small` is the shipped preset in float32 at a context of 32 tokens. `loader` waits for its data: a sample takes 5 ms to
fetch, and workers fetch side by side. `nothing` waits 40 ms in forward for what no option is of: whatever is taken,
"nothing helped" is the right answer. After each, the first setting and what `improved.yaml` says run in turns, fresh
processes of `fit`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lm_profiler.analysis.compare.ratio import repeats_interval
from lm_profiler.measure.device.environment import device_name
from lm_profiler.record.improve_record import IMPROVED_CONFIG, read_improve
from lm_profiler.record.run_record import read_run
from lm_profiler.report.run.improve_table import headline, improve_table
from lm_profiler.report.tables.formats import markdown
from lm_profiler.report.tables.table import text_table

FETCH_S, WAIT_S = 0.005, 0.04


class Files(Dataset[Tensor]):
    """Samples that take a while, as from a disk that is far away."""

    def __init__(self, fetch_s: float) -> None:
        self.fetch_s = fetch_s

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, at: int) -> Tensor:
        if self.fetch_s:
            time.sleep(self.fetch_s)
        return torch.full((64,), at / 1e5)


class Loader(LightningDataModule):
    """Batches of ``Files``."""

    def __init__(
        self, batch_size: int = 16, num_workers: int = 0, fetch_s: float = FETCH_S
    ) -> None:
        super().__init__()
        self.batch_size, self.num_workers, self.fetch_s = (
            batch_size,
            num_workers,
            fetch_s,
        )

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(
            Files(self.fetch_s), self.batch_size, num_workers=self.num_workers
        )


class Mine(LightningModule):
    """A few small layers, and ``wait_s`` for what is not training."""

    def __init__(self, wait_s: float = 0.0) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)
        )
        self.wait_s = wait_s

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.wait_s:
            time.sleep(self.wait_s)
        return (self.layers(batch) - batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-4)


_OWN = (
    "--model=benchmarks.improve_real.Mine",
    "--data=benchmarks.improve_real.Loader",
    "--trainer.accelerator=cpu",
)
CASES: dict[str, Sequence[str]] = {
    "loader": _OWN,
    "nothing": (*_OWN, "--data.fetch_s=0", f"--model.wait_s={WAIT_S}"),
    "small": (
        *(
            "--config=small_fp32",
            "--data.context_length=32",
            "--trainer.accelerator=cpu",
        ),
        *("--stages.warmup_steps=2", "--stages.measure_steps=6"),
    ),
}


def call(*arguments: str) -> None:
    """``python -m lm_profiler`` with these, whatever its end."""
    print("$ lm_profiler", *arguments, flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "lm_profiler", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        print(f"ended with {done.returncode}: {done.stderr}", flush=True)


def in_turns(
    first: Sequence[str], improved: Path, pairs: int, folder: Path
) -> tuple[list[float], list[float]]:
    """Mean steps, in seconds, of as many runs of both, A first and B first in turns."""
    sides = {"a": first, "b": [f"--config={improved}"]}
    timed: dict[str, list[float]] = {"a": [], "b": []}
    for pair in range(pairs):
        for side in ("ab", "ba")[pair % 2]:
            name = f"{side}{pair}"
            off = [f"--{stage}.steps=0" for stage in ("actions", "memory", "trace")]
            call("fit", *sides[side], *off, f"--log_dir={folder}", f"--name={name}")
            timed[side].append(read_run(folder / name / "version_0").time["step"].mean)
    return timed["a"], timed["b"]


def trial(name: str, budget: str, pairs: int, log_dir: Path) -> list[str]:
    """A row: what `improve` says, in which time, and what runs in turns say of the same two settings."""
    folder = log_dir / name
    begun = time.monotonic()
    call(
        "improve",
        *CASES[name],
        f"--budget={budget}",
        f"--log_dir={log_dir}",
        f"--name={name}",
    )
    wall_s = time.monotonic() - begun
    record = read_improve(folder)
    print(markdown(improve_table(record)), flush=True)
    again = "nothing to compare"
    if (folder / IMPROVED_CONFIG).exists():
        a, b = in_turns(
            CASES[name], folder / IMPROVED_CONFIG, pairs, log_dir / f"{name}_again"
        )
        interval = repeats_interval(b, a, 0.95)
        again = (
            "unknown"
            if interval is None
            else f"{interval.ratio:.2f} × [{interval.low:.2f}, {interval.high:.2f}]"
        )
    kept = ", ".join(of.name for of in record.tried if of.accepted) or "none"
    return [
        name,
        kept,
        headline(record),
        again,
        str(record.runs),
        f"{record.elapsed_s:.0f} of {record.budget_s:.0f}",
        f"{wall_s:.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--budget", default="10m")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--log_dir", type=Path, default=Path("logs/improve_real"))
    given = parser.parse_args()
    print(device_name(torch.device("cpu")), f"torch {torch.__version__}", flush=True)
    rows = [
        trial(name, given.budget, given.pairs, given.log_dir)
        for name in given.cases.split(",")
    ]
    titles = (
        "",
        "kept",
        "what it says",
        "runs in turns say",
        "runs",
        "budget (s)",
        "wall (s)",
    )
    print(markdown(text_table(titles, rows, left=4)), end="")


if __name__ == "__main__":
    main()
