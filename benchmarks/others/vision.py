"""Images: after timm, lightning-hydra-template, and the usual VAE, GAN, diffusion and contrastive examples."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

CLASSES, PIXELS, BATCH = 10, 16, 32


def images(rows: int = 512, *, views: int = 1) -> DataLoader[Any]:
    made = torch.Generator().manual_seed(1)
    parts = [torch.randn(rows, 3, PIXELS, PIXELS, generator=made) for _ in range(views)]
    return DataLoader(
        TensorDataset(*parts, torch.randint(CLASSES, (rows,), generator=made)),
        batch_size=BATCH,
        drop_last=True,
    )


class DropPath(nn.Module):
    def __init__(self, drop_prob: float = 0.0) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1 - self.drop_prob
        random_tensor = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(
            keep
        )
        if keep > 0.0:
            random_tensor.div_(keep)
        return x * random_tensor


class Mixer(nn.Module):
    def __init__(self, width: int, drop_path: float) -> None:
        super().__init__()
        self.norm, self.mlp = (
            nn.LayerNorm(width),
            nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            ),
        )
        self.drop_path = DropPath(drop_path)
        self.gamma = nn.Parameter(1e-6 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop_path(self.gamma * self.mlp(self.norm(x)))


class Timm(LightningModule):
    """Rates of drop path by linspace, mixup by a drawn permutation, an average of weights, label smoothing."""

    def __init__(
        self, depth: int = 4, width: int = 96, drop_path_rate: float = 0.1
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        dpr = [x.item() for x in torch.linspace(0, drop_path_rate, depth)]
        per_stage = [
            x.tolist() for x in torch.linspace(0, drop_path_rate, depth).split(2)
        ]
        assert sum(len(stage) for stage in per_stage) == depth
        self.stem = nn.Conv2d(3, width, 4, 4)
        self.blocks = nn.Sequential(*[Mixer(width, rate) for rate in dpr])
        self.head = nn.Linear(width, CLASSES)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        self.ema = (
            copy.deepcopy(nn.ModuleList([self.stem, self.blocks, self.head]))
            .requires_grad_(False)
            .eval()
        )

    def train_dataloader(self) -> Any:
        return images()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x).flatten(2).transpose(1, 2)).mean(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        lam = torch.distributions.Beta(0.8, 0.8).sample().item()
        index = torch.randperm(x.size(0)).tolist()
        mixed = lam * x + (1 - lam) * x[index]
        logits = self(mixed)
        loss = lam * F.cross_entropy(logits, y, label_smoothing=0.1) + (
            1 - lam
        ) * F.cross_entropy(logits, y[index])
        acc = (logits.argmax(-1) == y).float().mean().item()
        self.log_dict({"loss": loss.item(), "acc": acc, "acc_percent": 100 * acc})
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            now = nn.ModuleList([self.stem, self.blocks, self.head])
            for mine, its in zip(self.ema.parameters(), now.parameters(), strict=True):
                mine.mul_(0.999).add_(its, alpha=0.001)

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: Any = None,
        gradient_clip_algorithm: Any = None,
    ) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        self.log("norm", norm.item())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        total = self.trainer.estimated_stepping_batches
        one_cycle = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=1e-3, total_steps=total
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": one_cycle, "interval": "step"},
        }


class HydraTemplate(LightningModule):
    """As lightning-hydra-template's MNISTLitModule."""

    def __init__(self, compiled: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net = nn.Sequential(
            nn.Flatten(),
            nn.Linear(3 * PIXELS**2, 128),
            nn.BatchNorm1d(128),
            nn.ReLU(),
            nn.Linear(128, CLASSES),
        )
        self.criterion = nn.CrossEntropyLoss()
        self.train_acc, self.train_loss, self.val_acc_best = (
            MulticlassAccuracy(CLASSES),
            MeanMetric(),
            MaxMetric(),
        )
        self.metrics = MetricCollection(
            {"f1": MulticlassF1Score(CLASSES), "acc": MulticlassAccuracy(CLASSES)},
            prefix="train/all_",
        )

    def train_dataloader(self) -> Any:
        return images()

    def on_train_start(self) -> None:
        self.val_acc_best.reset()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.net(x)
        loss, preds = self.criterion(logits, y), torch.argmax(logits, dim=1)
        self.train_loss(loss)
        self.train_acc(preds, y)
        self.log(
            "train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True
        )
        self.log(
            "train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True
        )
        self.log_dict(self.metrics(logits, y))
        return loss

    def setup(self, stage: str) -> None:
        if self.hparams.compiled and stage == "fit":
            self.net = torch.compile(self.net)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.trainer.model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, mode="min", factor=0.1, patience=10
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": scheduler,
                "monitor": "train/loss",
                "interval": "epoch",
                "frequency": 1,
            },
        }


class VAE(LightningModule):
    """Skips a batch whose loss is not finite; shows pictures now and then."""

    def __init__(self, latent: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Flatten(),
            nn.Linear(3 * PIXELS**2, 256),
            nn.ReLU(),
            nn.Linear(256, 2 * latent),
        )
        self.decoder = nn.Sequential(
            nn.Linear(latent, 256), nn.ReLU(), nn.Linear(256, 3 * PIXELS**2)
        )
        self.history: list[float] = []

    def train_dataloader(self) -> Any:
        return images()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        x = batch[0]
        mu, logvar = self.encoder(x).chunk(2, -1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        recon = self.decoder(z).view_as(x)
        kl = -0.5 * torch.mean(1 + logvar - mu.pow(2) - logvar.exp())
        loss = F.mse_loss(recon, x) + 0.1 * kl
        if loss.isnan() or not torch.isfinite(loss):
            print("skipped")
            return None
        self.history.append(loss.item())
        mean = sum(self.history[-10:]) / len(self.history[-10:])
        self.logger.experiment.add_scalar("kl", kl.item(), self.global_step)
        self.logger.log_metrics({"mean": mean, "kl": kl.item()}, step=self.global_step)
        if batch_idx % 4 == 0:
            print(
                f"[{self.global_step}] loss {loss.item():.4f} mean {mean:.3f} kl {kl:.3f}"
            )
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class GAN(LightningModule):
    """Two optimizers, stepped by hand; the generator every second batch, with a penalty on gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(32, 256),
            nn.LeakyReLU(0.2),
            nn.Linear(256, 3 * PIXELS**2),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Flatten(),
            nn.Linear(3 * PIXELS**2, 256),
            nn.LeakyReLU(0.2),
            nn.Linear(256, 1),
        )

    def train_dataloader(self) -> Any:
        return images()

    def penalty(self, real: Tensor, fake: Tensor) -> Tensor:
        alpha = torch.rand(real.size(0), 1, 1, 1, device=self.device)
        between = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        scores = self.discriminator(between)
        (grad,) = torch.autograd.grad(
            scores,
            between,
            torch.ones_like(scores),
            create_graph=True,
            retain_graph=True,
        )
        return ((grad.flatten(1).norm(2, dim=1) - 1) ** 2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        g_opt, d_opt = self.optimizers()
        z = torch.randn(real.size(0), 32).type_as(real)
        fake = self.generator(z).view_as(real)
        self.toggle_optimizer(d_opt)
        d_loss = (
            self.discriminator(fake.detach()).mean()
            - self.discriminator(real).mean()
            + 10 * self.penalty(real, fake.detach())
        )
        d_opt.zero_grad()
        self.manual_backward(d_loss)
        d_opt.step()
        self.untoggle_optimizer(d_opt)
        if batch_idx % 2 == 0:
            self.toggle_optimizer(g_opt)
            g_loss = -self.discriminator(fake).mean()
            g_opt.zero_grad()
            self.manual_backward(g_loss)
            self.clip_gradients(
                g_opt, gradient_clip_val=0.5, gradient_clip_algorithm="norm"
            )
            g_opt.step()
            self.untoggle_optimizer(g_opt)
            self.log("g_loss", g_loss.item(), prog_bar=True)
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.log("d_loss", d_loss, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.Adam(part.parameters(), lr=2e-4, betas=(0.5, 0.9))
            for part in (self.generator, self.discriminator)
        ]
        return optimizers, [
            torch.optim.lr_scheduler.ExponentialLR(each, 0.99) for each in optimizers
        ]


class UNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.time = nn.Sequential(
            nn.Linear(32, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.down, self.mid, self.up = (
            nn.Conv2d(3, width, 3, 2, 1),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ConvTranspose2d(2 * width, 3, 4, 2, 1),
        )
        self.norm = nn.GroupNorm(4, width)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        half = 16
        freqs = torch.exp(-torch.arange(half, device=x.device) * (9.2 / half))
        emb = torch.cat([(t[:, None] * freqs).sin(), (t[:, None] * freqs).cos()], -1)
        down = F.silu(self.norm(self.down(x)) + self.time(emb)[:, :, None, None])
        return self.up(torch.cat([down, F.silu(self.mid(down))], 1))


class Diffusion(LightningModule):
    """Noise at random steps of a known schedule, an average of weights by deepcopy, a schedule's buffers."""

    def __init__(self, steps: int = 100) -> None:
        super().__init__()
        self.unet, self.steps = UNet(), steps
        self.ema = copy.deepcopy(self.unet)
        for p in self.ema.parameters():
            p.requires_grad = False
        betas = torch.linspace(1e-4, 0.02, steps)
        bar = torch.cumprod(1 - betas, 0)
        self.register_buffer("bar", bar)
        assert bar[-1].item() < 1.0
        self.snr = [float(x) for x in (bar / (1 - bar)).tolist()]

    def train_dataloader(self) -> Any:
        return images()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        t = torch.randint(0, self.steps, (x.size(0),), device=self.device).long()
        noise = torch.randn_like(x)
        bar = self.bar[t][:, None, None, None]
        loss = F.mse_loss(
            self.unet(bar.sqrt() * x + (1 - bar).sqrt() * noise, t.float()), noise
        )
        self.log("train_loss", loss, prog_bar=True, on_step=True)
        return loss

    def on_before_zero_grad(self, *_: Any) -> None:
        decay = min(0.9999, (1 + self.global_step) / (10 + self.global_step))
        for mine, its in zip(
            self.ema.state_dict().values(), self.unet.state_dict().values(), strict=True
        ):
            mine.copy_(mine * decay + its.detach() * (1 - decay))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.unet.parameters(), lr=1e-4)
        return [optimizer], [
            torch.optim.lr_scheduler.CosineAnnealingLR(
                optimizer, T_max=self.trainer.max_epochs
            )
        ]


class SimCLR(LightningModule):
    """Two views, their similarities without the diagonal, a queue of keys."""

    def __init__(self, queue: int = 256, width: int = 64) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Flatten(),
            nn.Linear(3 * PIXELS**2, 128),
            nn.ReLU(),
            nn.Linear(128, width),
        )
        self.key = copy.deepcopy(self.encoder)
        for p in self.key.parameters():
            p.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(width, queue), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def train_dataloader(self) -> Any:
        return images(views=2)

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        ptr = int(self.queue_ptr)
        assert self.queue.size(1) % keys.size(0) == 0
        self.queue[:, ptr : ptr + keys.size(0)] = keys.T
        self.queue_ptr[0] = (ptr + keys.size(0)) % self.queue.size(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        a, b, _ = batch
        q = F.normalize(self.encoder(a), dim=1)
        with torch.no_grad():
            for p, k in zip(
                self.encoder.parameters(), self.key.parameters(), strict=True
            ):
                k.data = k.data * 0.99 + p.data * 0.01
            order = torch.randperm(b.size(0))
            keys = F.normalize(self.key(b[order]), dim=1)[torch.argsort(order)]
        logits = (
            torch.cat(
                [(q * keys).sum(1, keepdim=True), q @ self.queue.clone().detach()], 1
            )
            / 0.07
        )
        mask = torch.eye(q.size(0), dtype=torch.bool, device=self.device)
        similar = (q @ q.T)[~mask].view(q.size(0), -1)
        loss = (
            F.cross_entropy(
                logits, torch.zeros(len(q), dtype=torch.long, device=self.device)
            )
            + 0.01 * similar.mean()
        )
        self.enqueue(keys)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(
            self.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4
        )
