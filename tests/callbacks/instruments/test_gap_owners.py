"""Which modules count as trained, for forward passes outside of all phases; and how gaps are named."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lm_profiler.callbacks.instruments.gap_owners import GapsWatch, _name_of_gap
from lm_profiler.measure.clocks import tape


def watch_of(policy: nn.Module) -> GapsWatch:
    nothing: Any = SimpleNamespace()
    return GapsWatch(timeline=nothing, steps=nothing, is_compiled=lambda: False, modules=lambda: [policy])


def test_a_module_with_the_weights_of_the_trained_one_is_trained() -> None:
    """As the player of a reinforcement learner; a copy, such as its target network, is not."""
    policy = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    player, target = copy.deepcopy(policy), copy.deepcopy(policy)
    for own, trained in zip(player.parameters(), policy.parameters(), strict=True):
        own.data = trained.data
    watch = watch_of(policy)
    assert watch._is_trained(policy[0])
    assert watch._is_trained(player)
    assert not watch._is_trained(target)
    assert watch._may_follow(target)
    assert watch._may_follow(target[1])
    assert not watch._may_follow(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)))
    assert not watch_of(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))._may_follow(nn.Dropout())


def test_a_module_that_borrows_one_weight_or_has_no_memory_is_not_trained() -> None:
    policy = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    teacher = copy.deepcopy(policy)
    teacher[0].weight = policy[0].weight  # as a tied embedding
    watch = watch_of(policy)
    assert not watch._is_trained(teacher)
    assert not watch._is_trained(nn.Linear(4, 4, device=torch.device("meta")))
    assert not watch._is_trained(nn.LazyLinear(3))


@pytest.mark.parametrize(
    "last_phase, code, name",
    [
        (None, tape.FORWARD, "before the forward pass"),
        ("forward", tape.BACKWARD, "between the forward pass and backward()"),
        ("forward", tape.FORWARD, "between two forward passes"),
        ("optimizer", tape.OPTIMIZER, "between two calls of optimizer.step()"),
        ("optimizer", tape.OTHER, "between optimizer.step() and the next step"),
    ],
)
def test_a_gap_is_named_after_the_phases_on_its_sides(last_phase: str | None, code: int, name: str) -> None:
    assert _name_of_gap(last_phase, code) == name
