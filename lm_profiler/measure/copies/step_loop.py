"""What a copy of the module is to run: a step, and what the loop does around it. It can be sent to another process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lm_profiler.measure.counts.flop_formulas import UncountableError
from lm_profiler.torch_names import tree_leaves

Step = Callable[[nn.Module, Any], Tensor | Mapping[str, Any] | None]
"""(module, batch) to the loss, or to a mapping with the loss under ``"loss"``."""


def loss_of(result: Tensor | Mapping[str, Any] | None) -> Any:
    """Of what a ``Step`` returned."""
    return result.get("loss") if isinstance(result, Mapping) else result


@dataclass(frozen=True)
class MethodStep:
    """The step that a method of the module runs; unlike a lambda it can be sent to another process."""

    name: str
    rest: tuple[Any, ...] = ()
    """What follows the batch."""

    def __call__(self, module: nn.Module, batch: Any) -> Any:
        return getattr(module, self.name)(batch, *self.rest)


@dataclass(frozen=True)
class OptimizerShapes:
    """The parameters of an optimizer, and for each of them its states on the parameters' device."""

    parameters: list[Tensor]
    states: list[list[Tensor]]

    @classmethod
    def of(cls, optimizer: Optimizer, device: torch.device) -> OptimizerShapes:
        """Those of ``optimizer`` now.

        Raises:
            UncountableError: it runs the step as often as it likes.
        """
        if "max_eval" in optimizer.defaults:  # LBFGS
            raise UncountableError(f"{type(optimizer).__name__} runs a step several times")
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        states = [tree_leaves(optimizer.state.get(each, {})) for each in parameters]
        return cls(parameters, [[s for s in of if isinstance(s, Tensor) and s.device == device] for of in states])


@dataclass(frozen=True)
class StepLoop:
    """What the loop does around the step.

    Args:
        kind: who calls backward and the optimizer: the loop, the step itself, or nobody.
        batches: of one optimizer step, on one rank.
        precision: as Lightning names it.
        on_cpu: whether the device is the CPU. Elsewhere fused attention multiplies in the dtype that it is given.
        optimizers: of the module's parameters.
    """

    kind: Literal["automatic", "manual", "evaluation"] = "automatic"
    batches: int = 1
    precision: str = "32-true"
    on_cpu: bool = True
    optimizers: Sequence[OptimizerShapes] = ()
