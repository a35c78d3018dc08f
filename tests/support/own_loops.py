"""Training loops of many shapes that no Trainer runs, whose parts take known times on a simulated clock."""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import known_loop
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, IterableDataset

SECONDS = {
    "data": 2e-3,
    "transfer": 1e-3,
    "forward": 4e-3,
    "loss": 1e-3,
    "zero_grad": 1e-3,
    "backward": 6e-3,
    "clip": 2e-3,
    "optimizer": 3e-3,
    "other": 5e-3,
    "validation": 50e-3,
}
PHASE = {"loss": "forward"}
"""Where a wait counts, unless it is a phase itself."""

STEPS = 14


def spend(part: str) -> None:
    clock = known_loop.CLOCK
    clock.now_ns += round(SECONDS[part] * 1e9)


def slow(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def slow_function(*args: Any, **kwargs: Any) -> Any:
        spend(part)
        return function(*args, **kwargs)

    return slow_function


clip_grad_norm_ = nn.utils.clip_grad_norm_  # by its name, as many programs have it


def make_clipping_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    clip = slow("clip", nn.utils.clip_grad_norm_)
    for owner in (nn.utils, sys.modules[__name__]):
        monkeypatch.setattr(owner, "clip_grad_norm_", clip)
    monkeypatch.setattr(nn.utils, "get_total_norm", slow("clip", nn.utils.get_total_norm))


class SlowBackward(known_loop.SlowBackward):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        spend("backward")
        return grad


class SlowModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, batch: Any = None) -> Tensor:
        if not torch.is_grad_enabled():
            spend("validation" if not self.training else "other")
            return self.weight.detach()
        spend("forward")
        return SlowBackward.apply(self.weight)


class SlowSGD(known_loop.SlowSGD):
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        spend("optimizer")
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        spend("zero_grad")
        SGD.zero_grad(self, set_to_none)


class Batches(IterableDataset[Tensor]):
    def __init__(self, length: int = 10**6) -> None:
        self._length = length

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self._length):
            spend("data")
            yield torch.ones(2, 3)


def loader(length: int = 10**6) -> DataLoader[Tensor]:
    return DataLoader(Batches(length), batch_size=None)


def slow_model_and_optimizer() -> tuple[SlowModel, SlowSGD]:
    model = SlowModel()
    return model, SlowSGD(model.parameters())


@dataclass(frozen=True)
class Shape:
    """A loop, how often a step waits in each part, and how many of its steps are rows."""

    run: Callable[[], None]
    waits: dict[str, float]
    rows: int

    def seconds(self) -> dict[str, float]:
        sums: defaultdict[str, float] = defaultdict(float)
        for part, times in self.waits.items():
            sums[PHASE.get(part, part)] += times * SECONDS[part]
        return sums


ZOO: dict[str, Shape] = {}


def shape(rows: int = STEPS - 2, **waits: float) -> Callable[[Callable[[], None]], None]:
    def keep(run: Callable[[], None]) -> None:
        ZOO[run.__name__] = Shape(run, waits, rows)

    return keep


@shape(data=1, forward=1, backward=1, optimizer=1, zero_grad=1)
def usual() -> None:
    model, optimizer = slow_model_and_optimizer()
    for _, batch in zip(range(STEPS), loader(), strict=False):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@shape(data=1, forward=1, loss=1, backward=1, optimizer=1, zero_grad=1, clip=1)
def loss_after_the_call() -> None:
    model, optimizer = slow_model_and_optimizer()
    for _, batch in zip(range(STEPS), loader(), strict=False):
        optimizer.zero_grad()
        output = model(batch)
        spend("loss")
        output.sum().backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@shape(forward=1, backward=1, optimizer=1, zero_grad=1, other=1)
def batch_made_between() -> None:
    """nanoGPT's order: a function makes the next batch between forward and backward."""
    model, optimizer = slow_model_and_optimizer()
    for _ in range(STEPS):
        output = model(0)
        spend("other")
        output.sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@shape(data=1, forward=2, backward=2, optimizer=2, zero_grad=2)
def gan() -> None:
    (critic, critics), (maker, makers) = slow_model_and_optimizer(), slow_model_and_optimizer()
    for _, batch in zip(range(STEPS), loader(), strict=False):
        for model, optimizer in ((critic, critics), (maker, makers)):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()


@shape(rows=2 * STEPS - 3, forward=1, backward=1, optimizer=1, zero_grad=1)
def gan_without_loader() -> None:
    """A row for each optimizer. The second model is known once its optimizer has stepped."""
    (critic, critics), (maker, makers) = slow_model_and_optimizer(), slow_model_and_optimizer()
    for _ in range(STEPS):
        for model, optimizer in ((critic, critics), (maker, makers)):
            optimizer.zero_grad()
            model(0).sum().backward()
            optimizer.step()


@shape(data=1, forward=1, backward=1, optimizer=1, zero_grad=1, other=1)
def without_gradients_first() -> None:
    """A model that is trained makes something without gradients, in each step."""
    model, optimizer = slow_model_and_optimizer()
    for _, batch in zip(range(STEPS), loader(), strict=False):
        with torch.no_grad():
            model(batch)
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@shape(rows=STEPS - 1, data=1, forward=1, backward=1, optimizer=1, zero_grad=1)
def validates() -> None:
    """Epochs of seven batches, and a validation after each fifth step. The last step is seen to end."""
    model, optimizer = slow_model_and_optimizer()
    steps = 0
    training_loader, validation_loader = loader(7), DataLoader(torch.ones(2, 3))
    while steps < STEPS:
        for batch in training_loader:
            model.train()
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if steps % 5 == 0:
                model.eval()
                for held_out in validation_loader:
                    with torch.no_grad():
                        model(held_out)
                model.train()


def epochs_of_seven(validate: Callable[[SlowModel, DataLoader[Any]], None]) -> None:
    model, optimizer = slow_model_and_optimizer()
    training_loader, validation_loader = loader(7), DataLoader(torch.ones(6, 3), batch_size=2)
    for _ in range(STEPS // 7):
        for batch in training_loader:
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        validate(model, validation_loader)


@shape(rows=STEPS - 1, data=1, forward=1, backward=1, optimizer=1, zero_grad=1)
def validates_in_training_mode() -> None:
    """After each epoch, without gradients, as in programs without dropout."""

    def validate(model: SlowModel, validation_loader: DataLoader[Any]) -> None:
        with torch.no_grad():
            for batch in validation_loader:
                model(batch)

    epochs_of_seven(validate)


@shape(data=3, forward=3, backward=3, optimizer=1, zero_grad=1)
def accumulates() -> None:
    model, optimizer = slow_model_and_optimizer()
    for number, batch in zip(range(3 * STEPS), loader(), strict=False):
        model(batch).sum().backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


@shape(data=1, forward=1, backward=1, optimizer=1, zero_grad=1)
def fetches_ahead() -> None:
    model, optimizer = slow_model_and_optimizer()
    batches = iter(loader())
    batch = next(batches)
    for _ in range(STEPS):
        output = model(batch)
        batch = next(batches)
        output.sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@shape(data=1, forward=1, backward=1, optimizer=0.5, zero_grad=1)
def scaler_skips_steps() -> None:
    """Every other step of the optimizer is skipped, as its gradients are infinite."""
    model, optimizer = slow_model_and_optimizer()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for number, batch in zip(range(STEPS), loader(), strict=False):
        factor = float("inf") if number % 2 else 1.0
        scaler.scale(model(batch).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@shape(data=1, forward=1, backward=1, optimizer=1, zero_grad=1)
def closure() -> None:
    model, optimizer = slow_model_and_optimizer()
    for _, batch in zip(range(STEPS), loader(), strict=False):

        def compute(batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            loss = model(batch).sum()
            loss.backward()
            return loss

        optimizer.step(compute)


@shape(data=1, forward=1, backward=1, optimizer=1, zero_grad=1)
def optimizer_within_backward() -> None:
    model, optimizer = slow_model_and_optimizer()

    def step(parameter: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    model.weight.register_post_accumulate_grad_hook(step)
    for _, batch in zip(range(STEPS), loader(), strict=False):
        model(batch).sum().backward()


@shape(data=1, forward=1, backward=1, optimizer=1, zero_grad=1)
def calls_forward_itself() -> None:
    """No hook of torch is called."""
    model, optimizer = slow_model_and_optimizer()
    for _, batch in zip(range(STEPS), loader(), strict=False):
        model.forward(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


class ModelWithLoss(nn.Module):
    """Is not called itself: the program calls its methods."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = SlowModel()

    def loss(self, batch: Any) -> Tensor:
        spend("loss")
        return self._outputs(batch).sum()

    def _outputs(self, batch: Any) -> Tensor:
        outputs: Tensor = self.layer(batch)
        spend("loss")
        return outputs

    def train_batch(self, batch: Any, optimizer: SlowSGD) -> None:
        optimizer.zero_grad()
        spend("other")
        self.loss(batch).backward()
        optimizer.step()


@shape(rows=STEPS - 3, forward=1, loss=2, backward=1, optimizer=1, zero_grad=1, other=1)
def calls_a_method_of_the_model() -> None:
    model = ModelWithLoss()
    optimizer = SlowSGD(model.parameters())
    for batch in range(STEPS):
        loss = model.loss(batch)
        spend("other")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@shape(data=1, forward=1, loss=2, backward=1, optimizer=1, zero_grad=1, other=1)
def calls_a_method_that_runs_backward() -> None:
    """The method of the whole step is no forward pass."""
    model = ModelWithLoss()
    optimizer = SlowSGD(model.parameters())
    for _, batch in zip(range(STEPS), loader(), strict=False):
        model.train_batch(batch, optimizer)


@shape(data=2, forward=2, backward=2, optimizer=1, zero_grad=1, clip=1)
def all_batches_first() -> None:
    """torchtitan's order, with a container of optimizers, and clipping in two calls."""

    class Container(torch.optim.Optimizer):
        def __init__(self, inner: SlowSGD) -> None:
            self.inner = inner
            super().__init__([{"params": group["params"]} for group in inner.param_groups], {})

        def step(self, closure: Any = None) -> None:
            self.inner.step()

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.inner.zero_grad()

    model, inner = slow_model_and_optimizer()
    optimizer = Container(inner)
    batches = iter(loader())
    for _ in range(STEPS):
        optimizer.zero_grad()
        for batch in [next(batches) for _ in range(2)]:
            model(batch).sum().backward()
        nn.utils.get_total_norm([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
        optimizer.step()


@shape(data=1, forward=1, backward=1, optimizer=1, zero_grad=1)
def checkpoints_activations() -> None:
    """Backward calls the whole model once more: that is backward's time, but here it takes no time of its own."""
    model, _ = slow_model_and_optimizer()
    layers = torch.nn.ModuleList([model, torch.nn.Linear(1, 1)])

    class Checkpointed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, batch: Tensor) -> Tensor:
            hidden = self.layers[0](batch)
            return torch.utils.checkpoint.checkpoint(self.layers[1], hidden, use_reentrant=False)

    whole = Checkpointed()
    optimizer = SlowSGD(whole.parameters())
    for _, batch in zip(range(STEPS), loader(), strict=False):
        whole(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
