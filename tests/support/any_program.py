"""A program that trains and knows nothing of the profiler: ``any_program.py OUT``.

It writes its weights to OUT, prints one line to stdout, and ends with the code 7.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, TensorDataset


class Mine(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(160, 8), torch.randint(2, (160,))), batch_size=4, shuffle=True)


def main(out: Path) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    settings = {"max_epochs": 1, "enable_model_summary": False, "devices": 1, **quiet}
    made = LightningCLI(
        Mine, seed_everything_default=1, save_config_callback=None, trainer_defaults=settings, args=["fit"]
    )
    torch.save(made.model.state_dict(), out)
    print("trained", made.trainer.global_step)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.exit(7)
