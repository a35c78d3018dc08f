"""How right is the plan of several ranks? Each phase's planned peak of rank 0 beside the allocator's of a real run.

    python -m benchmarks.plan_ranks [--ranks 2 4 8] [--strategies ddp zero1 fsdp fsdp2]

As many GPUs as ranks are needed, simulated ones will do. The model is ours, with 175 MB of parameters. Aim: 2 %.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from lm_profiler.analysis.plan.planned import Planned
from lm_profiler.cli.rehearse import start_rehearsal, wait_for_plan
from lm_profiler.record.quantities import bytes_text
from lm_profiler.record.run_record import read_run

STRATEGIES = {
    "ddp": ["--trainer.strategy=ddp"],
    "zero1": ["--trainer.strategy=ddp", "--model.shard_optimizer_states=true"],
    "fsdp": ["--trainer.strategy=fsdp"],
    "fsdp2": ["--trainer.strategy=fsdp2"],
}
MODEL = (
    "--model.size=small",
    "--model.num_layers=3",
    "--data.batch_size=2",
    "--data.context_length=128",
)
STAGES = (
    "--stages.warmup_steps=2",
    "--stages.measure_steps=3",
    "--memory.steps=1",
    "--trace.steps=0",
)
WITHOUT = ("--actions.steps=0", "--check_memory=false")


def row(strategy: str, ranks: int) -> str:
    """A line of the table: the step's peak, the phase that is furthest off, and the peak of the timed steps."""
    call = ["fit", *MODEL, f"--trainer.devices={ranks}", *STRATEGIES[strategy]]
    plan = wait_for_plan(
        start_rehearsal(
            [*call, "--trainer.max_steps=2"], torch.cuda.get_device_capability()
        )
    )
    if not isinstance(plan, Planned):
        return f"| {strategy} | {ranks} | cannot be planned: {plan.reason} | | | | |"
    folder = tempfile.mkdtemp()
    command = [
        sys.executable,
        "-m",
        "lm_profiler",
        *call,
        *STAGES,
        *WITHOUT,
        f"--log_dir={folder}",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (found,) = Path(folder).rglob("run.json")
    record = read_run(found.parent)
    assert record.memory is not None
    real = {
        phase: part.allocated_peak or 0 for phase, part in record.memory.parts.items()
    }
    offs = {
        phase: peak / real[phase] - 1
        for phase, peak in plan.peaks.items()
        if real.get(phase)
    }
    worst = max(offs, key=lambda phase: abs(offs[phase]))
    timed = record.memory.measured.allocated_peak or 0
    print(
        {
            phase: (bytes_text(plan.peaks[phase]), f"{off:+.2%}")
            for phase, off in offs.items()
        },
        file=sys.stderr,
    )
    return (
        f"| {strategy} | {ranks} | {bytes_text(plan.peak)} | {plan.peak / max(real.values()) - 1:+.2%} "
        f"| {offs[worst]:+.2%} ({worst}) | {bytes_text(timed)} | {plan.peak / timed - 1:+.2%} |"
    )


def main() -> None:
    """Print a table, row by row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument(
        "--strategies", nargs="+", choices=STRATEGIES, default=[*STRATEGIES]
    )
    options = parser.parse_args()
    print(
        "| strategy | ranks | planned peak | off | phase furthest off | peak while timed | off |"
    )
    print("|:--|--:|--:|--:|--:|--:|--:|")
    for strategy in options.strategies:
        for ranks in options.ranks:
            print(row(strategy, ranks), flush=True)


if __name__ == "__main__":
    main()
