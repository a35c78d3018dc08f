"""Small modules of the kinds that libraries are made of, each with the FLOPs of its steps worked out by hand.

``paper(step)`` gives (forward, backward, recomputation) of the step with that number, counted from 1. In ``mm`` stands
one product [rows, inputs] x [inputs, outputs]. A backward pass has one product for the weight, and one for the input
where that needs a gradient.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

ROWS, WIDTH = 6, 8
Paper = tuple[int, int, int]


def mm(rows: int, inputs: int = WIDTH, outputs: int = WIDTH) -> int:
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


class TimeSeries(Kind):
    """An LSTM over a window, and the values that are missing left out by a mask (darts, neuralforecast)."""

    steps = 5

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, WIDTH, batch_first=True), nn.Linear(WIDTH, 1)

    def train_dataloader(self) -> Any:
        return batches(lambda g, i: torch.randn(ROWS, self.steps, 3, generator=g))

    def loss(self, batch: Tensor) -> Tensor:
        out = self.head(self.lstm(batch)[0]).squeeze(-1)
        known = batch[..., 0] > -9  # all are
        return out[known].square().sum() / known.sum().item()

    def paper(self, step: int) -> Paper:
        rows = ROWS * self.steps
        recurrent, head = mm(rows, 3, 4 * WIDTH) + mm(rows, WIDTH, 4 * WIDTH), mm(rows, WIDTH, 1)
        return recurrent + head, 2 * recurrent + 2 * head, 0


class GAN(Kind):
    """Two optimizers, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator_net, self.judge = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        self.calls += 1
        for_judge, for_generator = self.optimizers()  # type: ignore[misc]
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
        generate, judge = mm(ROWS), mm(ROWS, WIDTH, 1)
        return generate + 3 * judge, 2 * judge + 2 * judge + generate, 0


class Replay(Kind):
    """Q-learning: steps in an environment, a buffer, a target network (Lightning's own DQN)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, 4)
        self.target = copy.deepcopy(self.net)
        self.buffer: deque[tuple[Tensor, int]] = deque(maxlen=5)
        self.environment = itertools.count()

    def loss(self, batch: Tensor) -> Tensor:
        self.buffer.append((batch[0], next(self.environment)))
        seen = torch.stack([state for state, _ in random.choices(self.buffer, k=3)])
        with torch.no_grad():
            wanted = self.target(seen).max(1).values
            for old, new in zip(self.target.parameters(), self.net.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
        return (self.net(seen).max(1).values - wanted).square().mean()

    def paper(self, step: int) -> Paper:
        return 2 * mm(3, WIDTH, 4), mm(3, WIDTH, 4), 0

    def state_of_its_own(self) -> Any:
        return self.calls, [number for _, number in self.buffer], repr(self.environment), *self.target.parameters()


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
        encode, pairs = mm(ROWS), mm(ROWS, WIDTH, ROWS)
        return 2 * encode + pairs, pairs + encode, 0

    def state_of_its_own(self) -> Any:
        return self.calls, *self.momentum.state_dict().values()


@dataclass
class Graphs:
    """As PyTorch Geometric batches them: all nodes in a row, and how many graphs they make."""

    x: Tensor
    edges: Tensor
    graph_of: Tensor
    num_graphs: int


def graphs(generator: torch.Generator, index: int) -> Graphs:
    nodes = 5 + index % 3
    edges = torch.randint(nodes, (2, 3 * nodes), generator=generator)
    return Graphs(torch.randn(nodes, WIDTH, generator=generator), edges, torch.arange(nodes) % 2, 2)


class GraphNet(Kind):
    """Messages along edges, summed where they arrive; every batch has another size."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def train_dataloader(self) -> Any:
        return batches(graphs)

    def loss(self, batch: Graphs) -> Tensor:
        source, target = batch.edges
        nodes = torch.zeros_like(batch.x).index_add(0, target, self.message(batch.x[source]))
        pooled = torch.zeros(batch.num_graphs, WIDTH).index_add(0, batch.graph_of, nodes)
        return self.head(pooled).square().mean()

    def paper(self, step: int) -> Paper:
        edges = 3 * (5 + (step - 1) % 3)
        message, head = mm(edges), mm(2, WIDTH, 1)
        return message + head, message + 2 * head, 0


class SparseGraphNet(Kind):
    """The same with the edges as a sparse matrix: only what is stored is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def loss(self, batch: Tensor) -> Tensor:
        chain = torch.eye(ROWS).roll(1, 0).to_sparse()
        return torch.sparse.mm(chain, self.layer(batch)).square().mean()

    def paper(self, step: int) -> Paper:
        along = 2 * ROWS * WIDTH
        return mm(ROWS) + along, mm(ROWS) + along, 0


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
        mix, up, head = mm(rows, WIDTH, 3 * WIDTH), mm(rows, WIDTH, 4 * WIDTH), mm(rows, WIDTH, 11)
        forward = mix + attention + 2 * up + head
        return forward, 2 * forward, 2 * up


class Seq2Seq(Kind):
    """torch's own Transformer, which attends in three places."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Transformer(WIDTH, 2, 1, 1, 16, batch_first=True, dropout=0.1)

    def train_dataloader(self) -> Any:
        return batches(lambda g, i: torch.randn(2, 2, 4, WIDTH, generator=g))

    def loss(self, batch: Tensor) -> Tensor:
        out: Tensor = self.net(batch[0], batch[1], tgt_mask=self.net.generate_square_subsequent_mask(4))
        return out.square().mean()

    def paper(self, step: int) -> Paper:
        rows, attention = 2 * 4, 4 * 2 * 4**2 * WIDTH
        projections, feed = 4 * mm(rows), 2 * mm(rows, WIDTH, 16)
        forward = 3 * (projections + attention) + 2 * feed
        # What the data itself is multiplied by needs no gradient of it: encoder and decoder, query, key and value.
        return forward, 2 * forward - 2 * 3 * mm(rows), 0


class VAE(Kind):
    """Convolutions there and back, and a draw in between."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Conv2d(1, 4, 3, 2, 1), nn.ConvTranspose2d(2, 1, 4, 2, 1)

    def train_dataloader(self) -> Any:
        return batches(lambda g, i: torch.randn(2, 1, 8, 8, generator=g))

    def loss(self, batch: Tensor) -> Tensor:
        mean, spread = self.encode(batch).chunk(2, 1)
        drawn = mean + torch.randn_like(mean) * spread.exp()
        return F.mse_loss(self.decode(drawn), batch)

    def paper(self, step: int) -> Paper:
        there, back = 2 * 2 * 4 * 4 * (4 * 9), 2 * 2 * 4 * 4 * (2 * 16)
        return there + back, there + 2 * back, 0


class Diffusion(Kind):
    """Noise of a random step, a depthwise convolution, an EMA of the weights that nothing trains."""

    def __init__(self) -> None:
        super().__init__()
        self.depth, self.point = nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Conv2d(4, 4, 1)
        self.ema = [p.detach().clone() for p in (*self.depth.parameters(), *self.point.parameters())]

    def train_dataloader(self) -> Any:
        return batches(lambda g, i: torch.randn(2, 4, 8, 8, generator=g))

    def loss(self, batch: Tensor) -> Tensor:
        noise, level = torch.randn_like(batch), torch.rand(len(batch), 1, 1, 1)
        for old, new in zip(self.ema, (*self.depth.parameters(), *self.point.parameters()), strict=True):
            old.lerp_(new.detach(), 0.1)
        return F.mse_loss(self.point(self.depth(batch * (1 - level) + noise * level)), noise)

    def paper(self, step: int) -> Paper:
        depth, point = 2 * 2 * 64 * (4 * 9), 2 * 2 * 64 * 16
        return depth + point, depth + 2 * point, 0

    def state_of_its_own(self) -> Any:
        return self.calls, *self.ema


class Detection(Kind):
    """Images with any number of boxes: what the boxes choose is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Linear(WIDTH, 4)

    def train_dataloader(self) -> Any:
        def make(generator: torch.Generator, index: int) -> Any:
            images = [torch.randn(3, 4, 4, generator=generator) for _ in range(2)]
            return images, [torch.randint(4, (1 + (index + k) % 3, 2), generator=generator) for k in range(2)]

        return batches(make)

    def loss(self, batch: Any) -> Tensor:
        images, boxes = batch
        features = self.body(torch.stack(images))
        found = [self.head(feature[:, box[:, 0], box[:, 1]].T) for feature, box in zip(features, boxes, strict=True)]
        return torch.cat(found).square().mean()

    def paper(self, step: int) -> Paper:
        index = step - 1
        rows = sum(1 + (index + k) % 3 for k in range(2))
        body, head = 2 * 2 * 16 * (WIDTH * 27), mm(rows, WIDTH, 4)
        return body + head, body + 2 * head, 0


class Alternating(Kind):
    """An actor and a critic, each every other step, with a loader of their own that the step itself draws from."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.actor, self.critic = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.own: Iterator[Tensor] = iter([torch.full((1, WIDTH), float(n)) for n in range(99)])

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        self.calls += 1
        optimizer = self.optimizers()[batch_idx % 2]  # type: ignore[index]
        batch = batch + next(self.own)
        loss = self.critic(self.actor(batch)).square().mean() if batch_idx % 2 else self.actor(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()  # not Lightning's own
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=1e-3) for net in (self.actor, self.critic)]

    def paper(self, step: int) -> Paper:
        return (mm(ROWS), mm(ROWS), 0) if step % 2 else (2 * mm(ROWS), 3 * mm(ROWS), 0)

    def state_of_its_own(self) -> Any:
        return self.calls, [row[0, 0].item() for row in copy.copy(self.own)]


class Metric(Kind):
    """Distances between all pairs, the hardest of them picked by their values (pytorch-metric-learning)."""

    rows = 30

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)

    def train_dataloader(self) -> Any:
        return batches(lambda g, i: (torch.randn(self.rows, WIDTH, generator=g), torch.arange(self.rows) % 3))

    def loss(self, batch: Any) -> Tensor:
        points, labels = self.embed(batch[0]), batch[1]
        apart = torch.cdist(points, points)
        same = labels[:, None] == labels[None]
        hardest = apart.detach().masked_fill(~same, 0).argmax(1)
        nearest = apart.detach().masked_fill(same, 1e9).argmin(1)
        index = torch.arange(self.rows)
        return F.relu(apart[index, hardest] - apart[index, nearest] + 0.1).mean()

    def paper(self, step: int) -> Paper:
        pairs = mm(self.rows, WIDTH, self.rows)
        return mm(self.rows) + pairs, 2 * pairs + mm(self.rows), 0


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
        return 4 * mm(ROWS, WIDTH, 1), 4 * mm(ROWS, WIDTH, 1), 0


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
        one = mm(ROWS, WIDTH, 1)
        # vmap(grad): the product, and its weight's gradient; the penalty: x's gradient, that product's two gradients
        # and the first product's two.
        return 2 * one, one + 5 * one, 0


class Accumulating(Kind):
    """Three batches a step, each in two optimizers' phases."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def loss(self, batch: Tensor) -> Tensor:
        return self.layer(batch).square().mean()

    def paper(self, step: int) -> Paper:
        return 3 * mm(ROWS), 3 * mm(ROWS), 0


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).relu())
        return out


class Compiled(Kind):
    """Two layers in one graph, made by a backend that needs no compiler."""

    def __init__(self, backend: str = "eager") -> None:
        super().__init__()
        self.net = TwoLayers()
        self.net.compile(backend=backend)

    def loss(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()

    def paper(self, step: int) -> Paper:
        return 2 * mm(ROWS), 3 * mm(ROWS), 0


class CompiledOutside(Compiled):
    """Of ``nn.Sequential`` torch.compile makes no graph at all, and looks at every function that it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))  # type: ignore[assignment]
        self.net.compile(backend="eager")


class CompiledWithValues(Compiled):
    """What a copy without data cannot do."""

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) * (1.0 if batch.sum().item() > 0 else 2.0)


KINDS: list[type[Kind]] = [
    *(TimeSeries, GAN, Replay, Contrastive, GraphNet, SparseGraphNet, Masked, Seq2Seq, VAE, Diffusion, Detection),
    *(Alternating, Metric, Closures, Differentiated, Accumulating),
]
