"""What forward passes read and make, against bytes counted by hand."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from faults import fault_in
from on_shapes import count_work
from torch import Tensor, nn

from lm_profiler.measure.counts.flops import FlopCounter
from lm_profiler.measure.counts.traffic import ForwardTraffic
from lm_profiler.models.config import PRESETS, TransformerConfig
from lm_profiler.models.transformer import Transformer

ROWS = torch.ones(3, 8)
INPUT = 3 * 8 * 4
WEIGHT = 8 * 8 * 4


def read_bytes(*passes: Callable[[], Any]) -> int | None:
    """Bytes that forward ``passes`` read."""
    traffic = ForwardTraffic()
    with FlopCounter(traffic):
        for forward in passes:
            traffic.begin()
            forward()
    return traffic.take()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_weights_are_read_in_their_own_dtype(dtype: torch.dtype) -> None:
    layer, rows = nn.Linear(8, 4, dtype=dtype), torch.ones(3, 8, dtype=dtype)
    assert read_bytes(lambda: layer(rows)) == (8 * 4 + 4 + 3 * 8) * dtype.itemsize


def test_each_element_is_read_once_per_pass() -> None:
    layer = nn.Linear(8, 8, bias=False)
    assert read_bytes(lambda: layer(layer(ROWS))) == WEIGHT + INPUT
    assert read_bytes(lambda: layer(ROWS), lambda: layer(ROWS)) == 2 * (WEIGHT + INPUT)
    table, tokens = nn.Embedding(10, 8), torch.arange(3)
    assert read_bytes(lambda: F.linear(table(tokens), table.weight)) == 10 * 8 * 4 + 3 * 8


def test_only_what_is_not_made_in_forward_is_read() -> None:
    layer = nn.Linear(8, 8, bias=False)
    assert read_bytes(lambda: (torch.zeros(100) + 1).sum()) == 0
    assert read_bytes(lambda: layer(ROWS).sum().backward()) == WEIGHT + INPUT
    weight = torch.ones(8, 8)
    assert read_bytes(lambda: (torch.empty_like(weight), weight.new_zeros(3))) == 0
    assert read_bytes(lambda: (weight.t(), weight.view(64), weight[2])) == 0


def test_statistics_of_a_norm_in_evaluation_are_read() -> None:
    """Beside its weight and bias."""
    norm = nn.BatchNorm1d(8).eval()
    assert read_bytes(lambda: norm(ROWS)) == INPUT + 4 * 8 * 4


def test_only_rows_that_are_looked_up_are_read() -> None:
    """Three rows of 8 numbers, and three indices of 8 bytes."""
    table, tokens = nn.Embedding(1000, 8), torch.arange(3)
    assert read_bytes(lambda: table(tokens)) == 3 * 8 * 4 + 3 * 8
    assert read_bytes(lambda: table.weight[tokens]) == 3 * 8 * 4 + 3 * 8
    assert read_bytes(lambda: table.weight[:5] + 1) == 5 * 8 * 4


def test_a_row_that_is_looked_up_again_is_read_once() -> None:
    """The 50 indices are made in the pass."""
    table = nn.Embedding(2, 8)
    assert read_bytes(lambda: table(torch.zeros(50, dtype=torch.int64))) == 2 * 8 * 4


def test_autocasts_copies_are_no_activations() -> None:
    layer, traffic = nn.Linear(8, 8, bias=False), ForwardTraffic()
    with FlopCounter(traffic), torch.autocast("cpu", torch.bfloat16):
        traffic.begin()
        out = layer(ROWS)
        made, copies = set(traffic.made_storages), set(traffic.copied_storages)
    assert traffic.take() == WEIGHT + INPUT  # as they are stored, in float32
    assert id(out.untyped_storage()) in made - copies
    assert len(copies) == 2  # of weight and input


def test_an_address_may_be_used_again() -> None:
    traffic, result = ForwardTraffic(), torch.ones(3, 8)
    place = id(result.untyped_storage())
    traffic.copied_storages.add(place)
    traffic.note_call(torch.ops.aten.tanh.default, (ROWS,), {}, result)
    assert (traffic.made_storages, traffic.copied_storages) == ({place}, set())


def test_without_a_pass_the_traffic_is_unknown() -> None:
    assert ForwardTraffic().take() is None
    layer, before = nn.Linear(8, 8), torch.zeros(3, 8)
    with fault_in(ForwardTraffic.note_call):
        assert read_bytes(lambda: before.copy_(layer(ROWS))) is None
    assert before.any()


def kind_of_model(config: TransformerConfig) -> tuple[object, ...]:
    """What decides how weights are read; the rest are sizes."""
    repeats_heads = config.num_kv_heads is not None
    return config.architecture, config.tied_embeddings, config.num_experts > 0, repeats_heads, config.qk_norm


SIZES = {kind_of_model(config): size for size, config in PRESETS.items()}
"""One of each kind."""


@pytest.mark.parametrize("size", SIZES.values())
def test_a_shipped_size_reads_its_weights(size: str) -> None:
    preset, batch, context = PRESETS[size], 2, 16
    config = replace(preset, num_layers=2, num_experts=min(preset.num_experts, 16))
    with torch.device("meta"):
        model = Transformer(config)
        ids = torch.zeros(batch, context, dtype=torch.int64)
    counted = count_work(model, lambda m, b: F.cross_entropy(m(b).flatten(0, 1).float(), b.flatten()), ids)
    weights = config.num_parameters(embedding=False) * 4
    tokens = batch * context
    rows = tokens
    if config.tied_embeddings:
        rows = config.vocab_size  # the head reads the whole table, which counts once
    positions = context if config.architecture == "gpt2" else 0
    table_bytes = (rows + positions) * config.d_model * 4
    loads = config.num_layers * config.num_experts * 8  # a count for each expert of a layer
    assert counted.read_bytes == weights + table_bytes + loads + tokens * 8


def test_each_product_has_its_own_dtype() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8, dtype=torch.bfloat16), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x.bfloat16()).float())

    product = 2 * 3 * 8 * 8
    counted = count_work(Mixed(), lambda m, b: m(b).sum(), ROWS)
    assert counted.by_dtype["forward"] == {"bfloat16": product, "float32": product}
    assert counted.by_dtype["backward"] == {"float32": 2 * product, "bfloat16": product}  # the input needs none
    counter, layer = FlopCounter(), nn.Linear(8, 8)
    with counter, torch.autocast("cpu", torch.bfloat16):
        layer(ROWS).sum().backward()
    assert set(counter.by_dtype()["forward"]) == set(counter.by_dtype()["backward"]) == {"bfloat16"}
