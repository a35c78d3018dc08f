"""A training inside somebody's own torch.profiler (argument: whose). Prints how many events that one has."""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from faults import Tiny, profiler
from lightning.pytorch import Trainer
from lightning.pytorch.profilers import PyTorchProfiler


def fit(**options: Any) -> str:
    ours = profiler()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=-1,
        default_root_dir=Path(tempfile.mkdtemp()),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ours],
        **options,
    )
    trainer.fit(Tiny())
    assert ours.record is not None
    assert ours.record.time["step"].n == 3
    return "; ".join(ours.record.notes)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1] == "Lightning's":
        users = PyTorchProfiler(dirpath=tempfile.mkdtemp(), filename="users", schedule=None, export_to_chrome=False)
        notes = fit(profiler=users)
        events = list(users.function_events or [])
    else:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as around:
            notes = fit()
        events = list(around.events() or [])
    print(sum(event.name == "aten::addmm" for event in events), notes)
