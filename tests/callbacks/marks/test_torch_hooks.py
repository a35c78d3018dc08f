"""Hooks of all optimizers can be removed at any time without harm to the program."""

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lm_profiler.callbacks.marks.torch_hooks import remove_step_hook


def test_a_hook_that_is_removed_within_a_step_does_not_end_the_step() -> None:
    """torch iterates over the hooks. A profiler that the program starts there makes our trace stop, for example."""
    calls: list[str] = []
    module = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    ours = register_optimizer_step_post_hook(lambda *_: calls.append("ours"))
    programs = register_optimizer_step_post_hook(lambda *_: remove_step_hook(ours))
    try:
        optimizer.step()
        optimizer.step()
        remove_step_hook(ours)
        optimizer.step()
    finally:
        programs.remove()
    assert calls == ["ours", "ours"]
