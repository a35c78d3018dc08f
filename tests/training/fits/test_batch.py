"""The estimate of what forward leaves for backward, against what autograd saves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from lm_profiler.models.config import TransformerConfig
from lm_profiler.models.transformer import Transformer
from lm_profiler.training.fits.batch import activation_bytes, batch_refusal
from lm_profiler.training.fits.states import Plan

CONFIG = TransformerConfig(d_model=64, d_ff=192, num_layers=4, num_heads=4, vocab_size=100)
BATCH, CONTEXT = 2, 32


def saved_bytes(config: TransformerConfig, precision: str) -> int:
    """Of the tensors that autograd saves, weights left out, each storage once."""
    model = Transformer(config).to(torch.bfloat16 if precision == "bf16-true" else torch.float32)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    tokens = torch.randint(config.vocab_size, (BATCH, CONTEXT))
    mixed = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), mixed:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        assert loss.isfinite()
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("attention", ["sdpa", "math"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_more_layers_save_as_many_bytes_more_as_estimated(attention: str, precision: str, checkpointing: bool):
    config = replace(CONFIG, attention=attention, activation_checkpointing=checkpointing)
    deep = replace(config, num_layers=12)
    saved = saved_bytes(deep, precision) - saved_bytes(config, precision)
    if precision == "bf16-mixed" and checkpointing:  # autocast's copies of the weights are saved in backward alone
        saved += 2 * (deep.num_parameters() - config.num_parameters())
    estimates = [activation_bytes(Plan(c, precision, batch_size=BATCH, context_length=CONTEXT)) for c in (config, deep)]
    assert estimates[1] - estimates[0] == pytest.approx(saved, rel=0.1)


def test_activations_grow_with_batch_and_context_and_vanish_without_backward():
    plan = Plan(CONFIG, context_length=CONTEXT)
    one = activation_bytes(plan)
    assert activation_bytes(replace(plan, batch_size=4)) == 4 * one
    assert activation_bytes(replace(plan, context_length=2 * CONTEXT)) == 2 * one
    assert activation_bytes(replace(plan, training=False)) < one / 2


def test_the_logits_count_three_times():
    wide = replace(CONFIG, vocab_size=1100)
    assert activation_bytes(Plan(wide)) - activation_bytes(Plan(CONFIG)) == 3 * 1000 * 4


@pytest.mark.parametrize("precision,bytes_each", [("32-true", 4), ("bf16-mixed", 2), ("bf16-true", 2)])
def test_a_batch_is_refused_where_its_logits_alone_are_too_many(precision: str, bytes_each: int) -> None:
    plan = Plan(CONFIG, precision, batch_size=8, context_length=32)
    need = plan.weights_bytes + plan.optimizer_bytes + 8 * 32 * (16 + 100 * bytes_each)
    assert batch_refusal(plan, need) is None
    message = batch_refusal(plan, need - 1)
    assert message is not None
    assert "(batch 8 x context 32, vocabulary 100)\nwould fit: " in str(message)


def test_the_batch_that_would_fit_is_the_largest_by_the_estimate() -> None:
    five = Plan(CONFIG, "bf16-mixed", batch_size=5, context_length=32)
    available = five.weights_bytes + five.optimizer_bytes + activation_bytes(five)
    message = batch_refusal(replace(five, batch_size=10**6), available)
    assert message is not None
    assert "would fit: --data.batch_size=5; --check_memory=false" in str(message)
    message = batch_refusal(replace(five, batch_size=1, context_length=10**9), available)
    assert message is not None
    assert "would fit: a shorter context; " in str(message)
