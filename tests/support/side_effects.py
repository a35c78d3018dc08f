"""A module that writes a line to a file wherever Lightning asks it for something: another run of any of it is seen."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

STEPS = 3
VARIABLE = "SIDE_EFFECTS"
"""Names the file, also to a process that runs the module once more."""


def note(what: str) -> None:
    with Path(os.environ[VARIABLE]).open("a", encoding="utf-8") as lines:
        lines.write(f"{what}\n")


class NotesAll(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        note("made")

    def prepare_data(self) -> None:
        note("prepared")

    def setup(self, stage: str) -> None:
        note("set up")

    def train_dataloader(self) -> Any:
        note("loader")
        return DataLoader(torch.ones(16, 2), batch_size=2)

    def configure_optimizers(self) -> Any:
        note("optimizer")
        return torch.optim.SGD(self.parameters(), 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        note(f"step {batch_idx}")
        return self.layer(batch).sum()


def lines_of(file: Path, run: Callable[[], object]) -> list[str]:
    """What is in ``file`` after ``run``."""
    os.environ[VARIABLE] = str(file)
    try:
        run()
    finally:
        del os.environ[VARIABLE]
    return file.read_text(encoding="utf-8").splitlines()
