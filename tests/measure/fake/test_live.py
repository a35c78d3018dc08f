"""Bytes of tensors as they come and go, real and fake."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lm_profiler.measure.fake.live import LiveBytes

MIB = 1 << 20


def work() -> None:
    """Holds 1 MiB, at most 3."""
    a = torch.empty(MIB, dtype=torch.uint8)
    view = a.view(2, -1)[1:]
    del a
    b = view.clone()  # half a MiB
    c = torch.cat([b, b, b])
    del b, view, c


@pytest.mark.parametrize("fake", [False, True])
def test_storages_count_from_their_making_to_their_end(fake: bool) -> None:
    live = LiveBytes()
    if fake:
        with FakeTensorMode(), live:
            work()
    else:
        with live:
            work()
    assert live.held_bytes == 0
    assert live.peaks() == (3 * MIB, None, None)
    live.reset()
    assert live.peaks() == (0, None, None)


def test_what_was_there_before_counts_once_it_is_seen() -> None:
    before, live = torch.empty(MIB, dtype=torch.uint8), LiveBytes()
    live.count_storages([before, before.view(2, -1)])
    assert live.held_bytes == MIB
    del before
    assert live.held_bytes == 0


def test_gradients_and_what_autograd_saved_count() -> None:
    live = LiveBytes()
    with live:
        x = torch.ones(MIB // 4, requires_grad=True)
        y = x.exp()  # saves its result
        loss = y.sum()
        del y
        assert live.held_bytes == 2 * MIB + 4
        loss.backward()
        assert live.held_bytes == 2 * MIB + 4  # x, its gradient and the loss
