"""Why a step cannot be rehearsed, and what a rehearsal notes of functions that the program compiles."""

from __future__ import annotations

import torch
from torch import Tensor

from lm_profiler.measure.fake.world import FakeWorld
from lm_profiler.rehearse.loop import reason_of


class Weights(torch.nn.Parameter):
    """Made of a plain tensor, as bitsandbytes' ``Params4bit``."""

    def __new__(cls, data: Tensor) -> Weights:
        return Tensor._make_subclass(cls, data, False)


def test_weights_that_need_data_are_named() -> None:
    with FakeWorld((9, 0)).inside():
        data = torch.empty(4, 4)
        try:
            Weights(data)
        except RuntimeError as error:
            reason = reason_of(error)
    assert reason.startswith("tensors of class Weights cannot be made from tensors without data (test_reasons.py, ")
