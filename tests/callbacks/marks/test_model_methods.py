"""A program that calls methods of its model, not the model, does what it does without the profiler."""

import functools
import inspect
import pickle
import sys
import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

from lm_profiler.callbacks.marks import called_modules
from lm_profiler.callbacks.own_loop import loop_options, profile_with

STEPS = 30


class Bound:
    """A decorator whose objects bind themselves: a call has no argument ``self``."""

    def __init__(self, function: Callable[..., Any], owner: Any = None) -> None:
        functools.update_wrapper(self, function)
        self.function, self.owner = function, owner

    def __get__(self, owner: Any, kind: type) -> "Bound":
        return Bound(self.function, owner)

    def __call__(self, *args: Any) -> Any:
        return self.function(self.owner, *args)

    def name(self) -> str:
        return "bound"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def plain(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.layer(batch).sum()
        return loss

    def with_keywords(self, **batches: Tensor) -> Tensor:
        return self.plain(batches["module"])

    @staticmethod
    def static(net: "Net", batch: Tensor) -> Tensor:
        return net.plain(batch)

    @classmethod
    def of_class(cls, net: "Net", batch: Tensor) -> Tensor:
        return net.plain(batch)

    @Bound
    def bound(self, batch: Tensor) -> Tensor:
        return self.plain(batch)

    @functools.lru_cache  # noqa: B019
    def cached(self, batch: Tensor) -> Tensor:
        return self.plain(batch)


def profiled_with(optimizer: torch.optim.Optimizer) -> Any:
    options = loop_options(
        warmup_steps=2, measure_steps=STEPS, memory_steps=0, trace_steps=0, action_steps=0, quiet=True
    )
    return profile_with(options, [optimizer])


def train(net: Any, loss_of: Callable[[Tensor], Tensor], after_step: Callable[[], object] = lambda: None) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with profiled_with(optimizer):
        for _ in range(STEPS):
            large = torch.zeros(1000)
            died = weakref.ref(large)
            loss_of(torch.ones(2, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
            after_step()
            del large
            assert died() is None


LOSSES = {
    "static": lambda net, batch: net.static(net, batch),
    "class": lambda net, batch: net.of_class(net, batch),
    "bound": lambda net, batch: net.bound(batch),
    "cached": lambda net, batch: net.cached(batch),
    "by its class": lambda net, batch: Net.plain(self=net, batch=batch),
    "keywords": lambda net, batch: net.with_keywords(module=batch),
}


@pytest.mark.parametrize("name", LOSSES)
def test_methods_of_all_kinds_are_called_as_without_us(name: str) -> None:
    net = Net()
    attributes = dict(vars(Net))

    def check() -> None:
        assert net.bound.name() == "bound"
        assert Net.cached.cache_info() is not None
        assert inspect.getfullargspec(net.plain).args == ["self", "batch"]
        for decorated in ("static", "of_class", "bound", "cached"):
            assert vars(Net)[decorated] is attributes[decorated]

    train(net, lambda batch: LOSSES[name](net, batch), check)
    assert vars(Net).items() <= attributes.items()


def test_a_class_that_is_copied_amid_training_has_nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    class Local(Net):  # cloudpickle copies it, as it copies classes of ``__main__``
        def loss(self, batch: Tensor) -> Tensor:
            return self.forward(batch).sum()

        def forward(self, batch: Tensor) -> Tensor:
            output: Tensor = self.layer(batch)
            return output

    net = Local()
    plain = Local.loss
    copies: list[bytes] = []
    marked: list[bool] = []

    def copy_all() -> None:
        copies.append(cloudpickle.dumps(net))
        marked.append(Local.loss is not plain)
        deepcopy(net).loss(torch.ones(2, 4))
        pickle.loads(pickle.dumps(Net()))

    train(net, lambda batch: net.loss(batch), copy_all)
    assert marked[-1]
    assert Local.loss is plain
    for name in list(sys.modules):
        if name.partition(".")[0] == "lm_profiler":
            monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    copied = pickle.loads(copies[-1])
    assert torch.equal(copied.loss(torch.ones(2, 4)), net.loss(torch.ones(2, 4)))


def test_local_variables_of_the_program_die_as_without_us() -> None:
    net = Net()
    train(net, lambda batch: net.plain(batch))


def test_methods_are_searched_in_a_few_steps_if_no_backward_pass_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []
    search = called_modules.running_methods
    monkeypatch.setattr(called_modules, "running_methods", lambda methods: searches.append(1) or search(methods))
    net = Net()
    parameters = list(net.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    with profiled_with(optimizer):
        for _ in range(STEPS):
            gradients = torch.autograd.grad(net.plain(torch.ones(2, 4)), parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
    assert 0 < len(searches) <= 10
