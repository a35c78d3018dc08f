"""A program that trains and knows nothing of the profiler: ``any_program.py OUT [--namespace NAME] [--strategy NAME]``.

It writes its weights to OUT, prints one line to stdout, and ends with the code 7.
"""

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--namespace", default="lightning.pytorch")
parser.add_argument("--strategy", default="auto")
parser.add_argument("--cli", action="store_true")
# Read at import: spawned ranks import this file anew, to find the class in it.
asked = parser.parse_args(sys.argv[1:])
pl = import_module(asked.namespace)


class Mine(pl.LightningModule):  # type: ignore[name-defined, misc]
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(160, 8), torch.randint(2, (160,))), batch_size=4, shuffle=True)

    def on_train_end(self) -> None:  # here and not after fit: spawned ranks keep their weights
        if self.trainer.is_global_zero:
            torch.save(self.state_dict(), asked.out)


def train(namespace: str, strategy: str, cli: bool) -> None:
    several = {"devices": 2, "strategy": strategy} if strategy != "auto" else {"devices": 1}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    settings = {"max_epochs": 1, "enable_model_summary": False, **quiet, **several}
    if cli:
        made = import_module(f"{namespace}.cli").LightningCLI(
            Mine, seed_everything_default=1, save_config_callback=None, trainer_defaults=settings, args=["fit"]
        )
        trainer = made.trainer
    else:
        pl.seed_everything(1)
        trainer = pl.Trainer(**settings)
        trainer.fit(Mine())
    if trainer.is_global_zero:
        print("trained", trainer.global_step)


if __name__ == "__main__":
    train(asked.namespace, asked.strategy, asked.cli)
    sys.exit(7)
