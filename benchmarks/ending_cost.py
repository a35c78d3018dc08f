"""What the callbacks add to a fit of 60 steps with defaults: CPU seconds and resident memory.

    python -m benchmarks.ending_cost [--rounds 3]

Each fit is a process of its own, with the callbacks and without them in turns. The module's own hooks read the CPU
clock, of the process and of those that it started, so that nothing is added to the list of callbacks. ``import`` is
that of ``lm_profiler.callbacks`` beyond Lightning's; ``traced`` are the steps in which PyTorch's profiler runs,
``steps`` all others; ``end`` is what comes after the traced ones: the trace is written and the record made. The first
fit on a machine also measures its rates; later ones have them from a file. The control is PyTorch's profiler alone over
the same steps, set up as the callbacks do and written to a file: its time and memory are those of a trace, whoever
takes it. ``beyond it`` is what the callbacks add to that.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Any

STEPS = 60
SPANS = ("import", "begin", "steps", "traced", "end")
HOW = ("bare", "profiler", "callbacks")
TRACED = (51, 52, 53)  # with defaults; the first is the profiler's warm-up
MODULES = {"small": 1, "150 layers": 150}


def used_s() -> float:
    """CPU seconds of this process and of those that it waited for."""
    return sum(
        of.ru_utime + of.ru_stime
        for of in map(getrusage, (RUSAGE_SELF, RUSAGE_CHILDREN))
    )


def fit(layers: int, how: str, folder: str) -> dict[str, float]:
    """CPU seconds of each span, and the peak of resident memory in bytes, of one fit in this process."""
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch import Tensor, nn
    from torch.utils.data import DataLoader

    at_s = [used_s()]
    began_s: list[float] = []
    ended_s: list[float] = []
    callbacks: list[Any] = []
    profiler = torch_profiler(folder) if how == "profiler" else None
    if how == "callbacks":
        from lm_profiler.callbacks import profiling_callbacks

        callbacks = profiling_callbacks(stop_when_done=False, log_dir=folder)
    at_s.append(used_s())

    class Stack(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            blocks = (
                nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64))
                for _ in range(layers)
            )
            self.blocks = nn.Sequential(*blocks)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss: Tensor = self.blocks(batch).square().mean()
            return loss

        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            began_s.append(used_s())

        def on_train_batch_end(self, *_: object) -> None:
            ended_s.append(used_s())
            if profiler is not None and len(ended_s) == TRACED[0] - 1:
                profiler.start()
            elif profiler is not None and len(ended_s) in TRACED:
                profiler.step()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    quiet = dict.fromkeys(
        (
            "logger",
            "enable_progress_bar",
            "enable_model_summary",
            "enable_checkpointing",
        ),
        False,
    )
    trainer = Trainer(
        accelerator="cpu", max_steps=STEPS, max_epochs=-1, callbacks=callbacks, **quiet
    )
    trainer.fit(Stack(), DataLoader(torch.rand(8 * STEPS, 64), batch_size=8))
    over_s = used_s()
    peak = getrusage(RUSAGE_SELF).ru_maxrss * 1024
    if callbacks and (traced := traced_steps(callbacks[0].folder)) != TRACED:
        raise SystemExit(f"traced were {traced}, not {TRACED}")
    before, last = TRACED[0] - 2, TRACED[-1] - 1  # numbers of lists
    rest_s = ended_s[-1] - (began_s[last + 1] if last < STEPS - 1 else ended_s[-1])
    spans = (
        at_s[1] - at_s[0],
        began_s[0] - at_s[1],
        ended_s[before] - began_s[0] + rest_s,
        ended_s[last] - ended_s[before],
        over_s - ended_s[last] - rest_s,
    )
    return dict(zip(SPANS, spans, strict=True)) | {"peak": float(peak)}


def torch_profiler(folder: str) -> Any:
    """Return PyTorch's profiler with the settings of the callbacks' own; it writes its file and is let go."""
    from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile, schedule

    def write(done: Any) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as own:
            done.export_chrome_trace(str(Path(own, "trace.json")))
        done.profiler = None

    return profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=len(TRACED) - 1, repeat=1),
        record_shapes=True,
        experimental_config=_ExperimentalConfig(trace_only=True),
        on_trace_ready=write,
    )


def traced_steps(folder: Path) -> tuple[int, ...]:
    """Their numbers."""
    from lm_profiler.record.steps import read_steps

    return tuple(
        row.step for row in read_steps(folder / "steps.csv") if row.stage == "trace"
    )


def child(layers: int, how: str, folder: str) -> dict[str, float]:
    """What ``fit`` returns, in a process of its own."""
    own = ["--layers", str(layers), "--folder", folder, "--how", how]
    command = [sys.executable, "-m", "benchmarks.ending_cost", *own]
    environment = {**os.environ, "XDG_CACHE_HOME": str(Path(folder) / "cache")}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return told


def added(rounds: int, layers: int) -> list[dict[str, dict[str, float]]]:
    """What the callbacks and the profiler added: of the first fit, and medians of later ones."""
    with tempfile.TemporaryDirectory() as folder:
        fits = [
            {how: child(layers, how, folder) for how in reversed(HOW)}
            for _ in range(rounds + 2)
        ]
    each = [
        {
            how: {of: told[how][of] - told["bare"][of] for of in told[how]}
            for how in HOW[1:]
        }
        for told in fits
    ]
    later = {
        how: {
            of: statistics.median(one[how][of] for one in each[2:])
            for of in each[0][how]
        }
        for how in HOW[1:]
    }
    return [each[0], later]


def beyond_traced(of: dict[str, float]) -> float:
    return sum(of[span] for span in SPANS if span != "traced")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    parser.add_argument("--how", choices=HOW, default=HOW[0], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.layers:
        warnings.simplefilter("ignore")
        print("\n" + json.dumps(fit(given.layers, given.how, given.folder)))
        return
    print(
        f"{platform.platform()}, Python {platform.python_version()}; {STEPS} steps, {given.rounds} later fits\n"
    )
    columns = [
        *(f"{span} (CPU s)" for span in SPANS),
        "all but traced (CPU s)",
        "resident (MB)",
        "PyTorch's profiler alone: all but traced (CPU s)",
        "resident (MB)",
        "beyond it (CPU s)",
        "beyond it (MB)",
    ]
    print("| added to | " + " | ".join(columns) + " |")
    print("|:--|" + "--:|" * len(columns))
    for name, layers in MODULES.items():
        for fit_, of in zip(
            ("first fit", "later fits"), added(given.rounds, layers), strict=True
        ):
            ours, alone = of["callbacks"], of["profiler"]
            seconds, alone_s = beyond_traced(ours), beyond_traced(alone)
            mb, alone_mb = ours["peak"] / 1e6, alone["peak"] / 1e6
            figures = [f"{ours[span]:.2f}" for span in SPANS] + [
                f"{seconds:.2f}",
                f"{mb:.0f}",
            ]
            control = [
                f"{alone_s:.2f}",
                f"{alone_mb:.0f}",
                f"{seconds - alone_s:.2f}",
                f"{mb - alone_mb:.0f}",
            ]
            print(
                f"| {name}, {fit_} | " + " | ".join(figures + control) + " |",
                flush=True,
            )


if __name__ == "__main__":
    main()
