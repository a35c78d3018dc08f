"""A LightningModule as anybody writes it, profiled by one more entry in the Trainer's list of callbacks."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lm_profiler.callbacks import profiling_callbacks

IMAGES, PIXELS, CLASSES, BATCH = 4096, 28 * 28, 10, 64


class Classifier(LightningModule):
    def __init__(self, hidden: int = 256) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(PIXELS, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    images = TensorDataset(
        torch.rand(IMAGES, PIXELS), torch.randint(CLASSES, (IMAGES,))
    )
    trainer = Trainer(
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=profiling_callbacks(
            warmup_steps=5, measure_steps=20, name="plain_module"
        ),
    )
    trainer.fit(Classifier(), DataLoader(images, batch_size=BATCH, shuffle=True))


if __name__ == "__main__":
    main()
