"""A GAN with manual optimization: two optimizers that take turns within one training_step.

A step is one batch here, and its phases add up over both networks' turns.
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader

from lm_profiler.callbacks import profiling_callbacks

POINTS, NOISE, HIDDEN, BATCH = 8704, 8, 128, 256


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, outputs)
    )


class GAN(LightningModule):
    """Learns a ring of points in the plane, with the non-saturating loss."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = mlp(NOISE, 2), mlp(2, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for_generator, for_discriminator = self.optimizers()
        made = self.generator(torch.randn(len(batch), NOISE, device=self.device))

        told_apart = softplus(-self.discriminator(batch)) + softplus(
            self.discriminator(made.detach())
        )
        for_discriminator.zero_grad()
        self.manual_backward(told_apart.mean())
        for_discriminator.step()

        for_generator.zero_grad()
        self.manual_backward(softplus(-self.discriminator(made)).mean())
        for_generator.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(net.parameters(), lr=2e-4)
            for net in (self.generator, self.discriminator)
        ]


def ring() -> Tensor:
    angle = 2 * torch.pi * torch.rand(POINTS)
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def main() -> None:
    trainer = Trainer(
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=profiling_callbacks(warmup_steps=5, measure_steps=20, name="gan"),
    )
    trainer.fit(GAN(), DataLoader(ring(), batch_size=BATCH, shuffle=True))


if __name__ == "__main__":
    main()
