"""How right is the timing? A loop whose every phase spins for a known time, measured by us and by SimpleProfiler.

    python -m benchmarks.known_answer [--steps 50]

The loop is that of the tests (tests/support/known_loop.py), which also run it under accumulation, manual
optimization, mixed precision and more. Here the medians are compared with the nominal times, on a quiet machine.
"""

from __future__ import annotations

import argparse
import logging
import platform
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.profilers import SimpleProfiler

from lm_profiler.callbacks import (
    ActionsOptions,
    MemoryOptions,
    StageOptions,
    TraceOptions,
    TrainingProfiler,
)
from lm_profiler.measure.device.environment import device_name
from lm_profiler.record.quantities import PHASES

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from known_loop import TRUTH_S, KnownModule, SlowLoader  # the tests' loop is no package

_ACTIONS = {
    "data": "[_TrainingEpochLoop].train_dataloader_next",
    "transfer": "[Strategy]SingleDeviceStrategy.batch_to_device",
    "forward": "[Strategy]SingleDeviceStrategy.training_step",
    "zero_grad": "[LightningModule]KnownModule.optimizer_zero_grad",
    "backward": "[Strategy]SingleDeviceStrategy.backward",
    "clip": "[LightningModule]KnownModule.configure_gradient_clipping",
    "optimizer": "[LightningModule]KnownModule.optimizer_step",
}
"""SimpleProfiler's own names for what comes nearest to each phase."""


def _trainer(folder: str, **options: object) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        max_epochs=-1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,  # type: ignore[arg-type]
    )


def ours(steps: int, folder: str) -> TrainingProfiler:
    """The loop under the instruments, without the untimed stages."""
    profiler = TrainingProfiler(
        StageOptions(warmup_steps=2, measure_steps=steps),
        MemoryOptions(steps=0),
        TraceOptions(steps=0),
        actions=ActionsOptions(steps=0),
        quiet=True,
        log_dir=folder,
    )
    _trainer(folder, callbacks=[profiler]).fit(KnownModule(), SlowLoader())
    return profiler


def simple(steps: int, folder: str) -> dict[str, float]:
    """Mean seconds of each action under SimpleProfiler, which keeps no medians."""
    profiler = SimpleProfiler()
    _trainer(folder, profiler=profiler, max_steps=steps).fit(
        KnownModule(), SlowLoader()
    )
    return {
        phase: sum(profiler.recorded_durations[a]) / steps
        for phase, a in _ACTIONS.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        record = ours(steps, folder).record
        theirs = simple(steps, folder)
    assert record is not None
    print(
        f"{device_name(torch.device('cpu'))}, {platform.platform()}, torch {torch.__version__}; {steps} steps\n"
    )
    print(
        "| phase | truth (ms) | lm_profiler, median (ms) | off | SimpleProfiler, mean (ms) |"
    )
    print("|:--|--:|--:|--:|--:|")
    for phase in PHASES:
        median = record.time[phase].median or 0.0
        off = median / TRUTH_S[phase] - 1.0
        print(
            f"| {phase} | {TRUTH_S[phase] * 1e3:.0f} | {median * 1e3:.3f} | {off:+.2%} | {theirs[phase] * 1e3:.3f} |"
        )
    other, step = record.time["other"].median or 0.0, record.time["step"].median or 0.0
    print(f"| other | 0 | {other * 1e3:.3f} | {other / step:.2%} of the step | |")
    print(
        f"| step | {sum(TRUTH_S.values()) * 1e3:.0f} | {step * 1e3:.3f} | {step / sum(TRUTH_S.values()) - 1:+.2%} | |"
    )


if __name__ == "__main__":
    main()
