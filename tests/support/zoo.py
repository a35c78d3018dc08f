"""Small modules of the kinds that libraries are made of, each with the FLOPs of its steps worked out by hand.

``paper(step)`` gives (forward, backward, recomputation) of the step with that number, counted from 1. ``product_flops``
is of one product [rows, inputs] x [inputs, outputs]. A backward pass has one product for the weight, and one for the
input where that needs a gradient.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

ROWS, WIDTH = 6, 8
Paper = tuple[int, int, int]


def product_flops(rows: int, inputs: int = WIDTH, outputs: int = WIDTH) -> int:
    return 2 * rows * inputs * outputs


def batches(make: Any, count: int = 64) -> DataLoader[Any]:
    """``count`` batches, the same at every call."""
    generator = torch.Generator().manual_seed(7)
    return DataLoader([make(generator, index) for index in range(count)], batch_size=None)


class Kind(LightningModule):
    """Counts its calls, which whoever counts twice would change."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        return batches(lambda g, i: torch.randn(ROWS, WIDTH, generator=g))

    def paper(self, step: int) -> Paper:
        raise NotImplementedError

    def state_of_its_own(self) -> Any:
        """What a second call of the step would change beside the weights."""
        return self.calls


class GAN(Kind):
    """Two optimizers, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator_net, self.judge = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.calls += 1
        for_judge, for_generator = self.optimizers()
        fake = self.generator_net(torch.randn_like(batch))
        judged = self.judge(batch).mean() - self.judge(fake.detach()).mean()
        for_judge.zero_grad()
        self.manual_backward(judged)
        for_judge.step()
        for_generator.zero_grad()
        self.manual_backward(self.judge(fake).mean())
        for_generator.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(net.parameters(), lr=1e-2) for net in (self.judge, self.generator_net)]

    def paper(self, step: int) -> Paper:
        generate, judge = product_flops(ROWS), product_flops(ROWS, WIDTH, 1)
        return generate + 3 * judge, 2 * judge + 2 * judge + generate, 0


class Contrastive(Kind):
    """Two views, a momentum encoder, every pair's similarity (lightly)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
        self.momentum = copy.deepcopy(self.encoder).requires_grad_(False)

    def loss(self, batch: Tensor) -> Tensor:
        for slow, fast in zip(self.momentum.parameters(), self.encoder.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.1)
        query = F.normalize(self.encoder(batch + torch.rand_like(batch)), dim=1)
        key = F.normalize(self.momentum(batch), dim=1)
        loss = F.cross_entropy(query @ key.T / 0.1, torch.arange(len(batch)))
        self.log("loss", loss, prog_bar=True)
        return loss

    def paper(self, step: int) -> Paper:
        encode, pairs = product_flops(ROWS), product_flops(ROWS, WIDTH, ROWS)
        return 2 * encode + pairs, pairs + encode, 0

    def state_of_its_own(self) -> Any:
        return self.calls, *self.momentum.state_dict().values()


class Masked(Kind):
    """A transformer's layer: attention under a mask, activation checkpointing, random dropout (Hugging Face)."""

    tokens, heads = 5, 2

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def train_dataloader(self) -> Any:
        def make(generator: torch.Generator, index: int) -> dict[str, Tensor]:
            ids = torch.randint(11, (2, self.tokens), generator=generator)
            return {"input_ids": ids, "attention_mask": ids < 10}

        return batches(make)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.embed(batch["input_ids"])
        shape = (len(x), self.tokens, self.heads, WIDTH // self.heads)
        query, key, value = (part.view(shape).transpose(1, 2) for part in self.mix(x).chunk(3, -1))
        mask = batch["attention_mask"][:, None, None] | torch.eye(self.tokens, dtype=torch.bool)
        x = x + F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2).flatten(2)
        x = x + checkpoint(lambda y: self.drop(self.down(F.gelu(self.up(y)))), x, use_reentrant=False)
        return (x @ self.embed.weight.T)[batch["attention_mask"]].square().mean()

    def paper(self, step: int) -> Paper:
        rows = 2 * self.tokens
        attention = 4 * 2 * self.tokens**2 * WIDTH
        mix, up, head = (
            product_flops(rows, WIDTH, 3 * WIDTH),
            product_flops(rows, WIDTH, 4 * WIDTH),
            product_flops(rows, WIDTH, 11),
        )
        forward = mix + attention + 2 * up + head
        return forward, 2 * forward, 2 * up


class Closures(Kind):
    """LBFGS calls the step as often as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)

    def loss(self, batch: Tensor) -> Tensor:
        return (self.layer(batch) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)

    def paper(self, step: int) -> Paper:
        return 4 * product_flops(ROWS, WIDTH, 1), 4 * product_flops(ROWS, WIDTH, 1), 0


class Differentiated(Kind):
    """A gradient penalty, and per-sample gradients by torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1, bias=False)

    def loss(self, batch: Tensor) -> Tensor:
        x = batch.requires_grad_()
        y = self.layer(x).tanh().sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        per_sample = torch.func.vmap(torch.func.grad(lambda w, row: (row @ w.T).square().sum()), (None, 0))
        self.spread = per_sample(self.layer.weight.detach(), batch.detach()).norm()
        return y + slope.square().sum()

    def paper(self, step: int) -> Paper:
        one = product_flops(ROWS, WIDTH, 1)
        # vmap(grad): the product, and its weight's gradient; the penalty: x's gradient, that product's two gradients
        # and the first product's two.
        return 2 * one, one + 5 * one, 0


class OneLayer(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def loss(self, batch: Tensor) -> Tensor:
        return self.layer(batch).square().mean()

    def paper(self, step: int) -> Paper:
        return product_flops(ROWS), product_flops(ROWS), 0


class Accumulating(OneLayer):
    """Three batches a step, each in two optimizers' phases."""

    def paper(self, step: int) -> Paper:
        return 3 * product_flops(ROWS), 3 * product_flops(ROWS), 0


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


class Compiled(Kind):
    """Two layers in one graph, made by a backend that needs no compiler."""

    def __init__(self, backend: str = "eager") -> None:
        super().__init__()
        self.net = TwoLayers()
        self.net.compile(backend=backend)

    def loss(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()

    def paper(self, step: int) -> Paper:
        return 2 * product_flops(ROWS), 3 * product_flops(ROWS), 0


class CompiledOutside(Compiled):
    """Of ``nn.Sequential`` torch.compile makes no graph at all, and looks at every function that it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.net.compile(backend="eager")


class CompiledWithValues(Compiled):
    """What a copy without data cannot do."""

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) * (1.0 if batch.sum().item() > 0 else 2.0)


KINDS: list[type[Kind]] = [GAN, Contrastive, Masked, Closures, Differentiated, Accumulating]
