"""A call is a repetition if the module had the same inputs before in the step, and not otherwise."""

import torch
from torch import nn

from lm_profiler.callbacks.instruments.repeated_calls import CallsOfStep


def test_only_the_same_inputs_of_one_module_in_one_step_are_a_repetition() -> None:
    calls = CallsOfStep()
    module, other_module = nn.Linear(2, 2), nn.Linear(2, 2)
    x, equal_x = torch.ones(2), torch.ones(2)
    assert not calls.add(module, (x,), {})
    assert calls.add(module, (x,), {})
    assert not calls.add(other_module, (x,), {})
    assert not calls.add(module, (equal_x,), {})  # another tensor, whatever it holds
    assert not calls.add(module, (x,), {"scale": 1.0})
    assert not calls.add(module, (x,), {"scale": 2.0})
    assert calls.add(module, (x,), {"scale": 1.0})
    calls.clear()
    assert not calls.add(module, (x,), {})
    # What may have changed is never the same, nor a new tensor in the place of one that nothing keeps alive.
    cache = {"keys": []}
    for arguments in ((x, cache), (x, cache), ("text",), ("text",)):  # without a tensor nothing is computed
        assert not calls.add(module, arguments, {})
    assert not any(calls.add(module, (torch.ones(2),), {}) for _ in range(3))


def test_calls_before_and_after_an_optimizer_step_are_no_repetition() -> None:
    """As a generator, that is trained between two calls on the same noise."""
    calls = CallsOfStep()
    module, other_module = nn.Linear(2, 2), nn.Linear(2, 2)
    x = torch.ones(2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    calls.add(module, (x,), {})
    calls.add(other_module, (x,), {})
    calls.forget_trained(optimizer)
    assert not calls.add(module, (x,), {})
    assert calls.add(other_module, (x,), {})


def test_a_module_in_evaluation_computes_something_else() -> None:
    """As one with dropout, whose accuracy is computed before its step."""
    calls = CallsOfStep()
    module, x = nn.Dropout(0.5), torch.ones(2)
    calls.add(module.eval(), (x,), {})
    assert not calls.add(module.train(), (x,), {})
    assert calls.add(module.eval(), (x,), {})


def test_an_input_that_was_changed_in_place_is_another_one() -> None:
    """As in a sampler, which adds noise to a picture between two calls."""
    calls = CallsOfStep()
    module, x = nn.Linear(2, 2), torch.ones(2)
    calls.add(module, (x,), {})
    x.add_(1.0)
    assert not calls.add(module, (x,), {})
    assert calls.add(module, (x,), {})
