from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lm_profiler.measure.checksums import checksum_of, weights_checksum


class ForbidOperators(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"the program's mode saw {function}")


class ForbidFunctions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"the program's mode saw {function}")


def test_a_change_through_data_changes_the_checksum() -> None:
    model = nn.Linear(3, 2)
    before = weights_checksum(model)
    assert weights_checksum(model) == before
    model.weight.data[0, 0] += 1
    assert weights_checksum(model) != before


def test_the_sum_is_that_of_the_bytes() -> None:
    assert checksum_of(torch.tensor([1, 2, 40])) == 43
    assert checksum_of(torch.tensor([1, -2, 5], dtype=torch.int8)) == 4


def test_buffers_count() -> None:
    model = nn.BatchNorm1d(3, affine=False)
    before = weights_checksum(model)
    model.running_mean.data += 1.0
    assert weights_checksum(model) != before


def test_tied_weights_are_read_once() -> None:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    checksum = weights_checksum(nn.Sequential(first, second))
    assert checksum is not None
    assert len(checksum) == 1


def test_the_modes_of_the_program_see_nothing() -> None:
    model = nn.Linear(3, 2)
    with ForbidOperators(), ForbidFunctions():
        assert weights_checksum(model) is not None
        assert checksum_of(model.weight) is not None


def test_what_has_no_elements_of_its_own_has_no_checksum() -> None:
    assert weights_checksum(nn.Linear(3, 2, device="meta")) is None
    assert checksum_of(torch.eye(2).to_sparse()) is None
