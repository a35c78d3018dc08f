"""A training beside somebody's own torch.profiler (argument: whose, or the step that a callback profiles).

Prints how many events that one has.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from faults import Tiny, profiler
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.profilers import PyTorchProfiler


class OneStep(Callback):
    """Profiles the forward and backward pass of one step."""

    def __init__(self, step: int) -> None:
        self._batch_idx = step - 1
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._batch_idx:
            self.profile.start()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._batch_idx:
            self.profile.stop()


def fit(*callbacks: Callback, **options: Any) -> str:
    ours = profiler()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=-1,
        default_root_dir=Path(tempfile.mkdtemp()),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, ours],
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
    elif sys.argv[1].isdecimal():
        theirs = OneStep(int(sys.argv[1]))
        notes = fit(theirs)
        events = list(theirs.profile.events() or [])
    else:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as around:
            notes = fit()
        events = list(around.events() or [])
    print(sum(event.name == "aten::addmm" for event in events), notes)
