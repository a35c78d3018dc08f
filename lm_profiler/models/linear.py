"""The linear layer of all models here, with its initialization."""

from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    """A linear layer.

    Weights are initialized from a normal distribution of variance 1 / inputs, truncated at three standard deviations;
    biases are initialized to 0.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        """Initialize the parameters; sharded strategies call this for weights that were made on the meta device."""
        std = self.in_features**-0.5
        nn.init.trunc_normal_(self.weight, std=std, a=-3 * std, b=3 * std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
