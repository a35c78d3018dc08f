"""Optimizers of the user's own: those that step as torch's of their name are timed, the others are refused."""

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lm_profiler.training.optimizers import check_name, check_optimizer, optimizer_class, optimizer_options
from lm_profiler.usage_error import UsageError


class MyAdamW(Optimizer):
    """As a textbook writes it: the decay comes after the update, epsilon inside of the scaled root."""

    corrects_bias, decay, couples_decay = True, True, False

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.95),
                 eps: float = 1e-8, weight_decay: float = 0.01) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                state, grad = self.state[p], p.grad
                if self.couples_decay:
                    grad = grad + group["weight_decay"] * p
                t = state["t"] = state.get("t", 0) + 1
                state["m"] = b1 * state.get("m", torch.zeros_like(p)) + (1 - b1) * grad
                state["v"] = b2 * state.get("v", torch.zeros_like(p)) + (1 - b2) * grad**2
                rate = group["lr"]
                if self.corrects_bias:
                    rate *= (1 - b2**t) ** 0.5 / (1 - b1**t)
                p -= rate * state["m"] / (state["v"].sqrt() + group["eps"])
                if self.decay and not self.couples_decay:
                    p -= group["lr"] * group["weight_decay"] * p


class AdamWWithoutCorrection(MyAdamW):
    corrects_bias = False


class AdamWWithoutDecay(MyAdamW):
    decay = False


class AdamWWithL2(MyAdamW):
    couples_decay = True


class SignDescent(Optimizer):
    """Of no name that torch has."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad.sign()


class Still(SignDescent):
    def step(self, closure: Any = None) -> None:
        pass


class Raising(SignDescent):
    def step(self, closure: Any = None) -> None:
        raise RuntimeError("no kernel")


class Sharded(Optimizer):
    def __init__(self, params: Iterable[nn.Parameter], optimizer_cls: type[Optimizer], **options: Any) -> None:
        super().__init__(params, {})
        self.inner = optimizer_cls(self.param_groups[0]["params"], **options)


@pytest.fixture(autouse=True)
def mine(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("my_optimizers")
    for name, value in globals().items():
        if isinstance(value, type):
            setattr(module, name, value)
    module.function = print
    monkeypatch.setitem(sys.modules, "my_optimizers", module)


TORCHS = [f"torch.optim:{name}" for name in ("AdamW", "Adam", "SGD", "RMSprop", "NAdam", "RAdam", "Adamax", "Adagrad")]
MINE = ["my_optimizers:MyAdamW", "my_optimizers:SignDescent", "my_optimizers:Sharded"]
OTHERWISE = ["AdamWWithoutCorrection", "AdamWWithoutDecay", "AdamWWithL2", "Still", "Raising"]
NONE = ["lion", "my_optimizers:Missing", "my_optimizers:function", "torch.nn:Linear", "x:"]


def test_optimizers_step_as_their_names_promise() -> None:
    for name in (*TORCHS, *MINE):
        check_name(name)
        check_optimizer(name)
    for name in OTHERWISE:
        with pytest.raises(UsageError, match=f"^optimizer: (expected )?my_optimizers:{name} "):
            check_optimizer(f"my_optimizers:{name}")
    for name in NONE:  # refused before a weight exists
        with pytest.raises(UsageError, match=r"^optimizer: expected"):
            check_name(name)


def test_options_are_those_that_the_class_takes() -> None:
    assert optimizer_options(SignDescent, 0.1, 0.2) == {"lr": 0.1}
    assert optimizer_options(optimizer_class("sgd"), 0.1, 0.2) == {"lr": 0.1, "weight_decay": 0.2}
    assert optimizer_options(Sharded, 0.1, 0.2)["optimizer_cls"] is torch.optim.AdamW
