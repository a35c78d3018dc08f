"""The linear map of all our modules, and how its weights start."""

from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    """A linear map.

    Its weights start normal, of variance 1 / inputs, cut off at three deviations; its biases start at 0.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        # sharded strategies call it to fill weights built on the meta device
        std = self.in_features**-0.5
        nn.init.trunc_normal_(self.weight, std=std, a=-3 * std, b=3 * std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
