"""The estimate of what forward leaves for backward, against what autograd saves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from lm_profiler.models import Transformer, TransformerConfig
from lm_profiler.training.fits.batch import activation_bytes, batch_refusal
from lm_profiler.training.fits.states import footprint

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
    estimates = [activation_bytes(c, BATCH, CONTEXT, precision) for c in (config, deep)]
    assert estimates[1] - estimates[0] == pytest.approx(saved, rel=0.1)


def test_activations_grow_with_batch_and_context_and_vanish_without_backward():
    one = activation_bytes(CONFIG, 1, CONTEXT)
    assert activation_bytes(CONFIG, 4, CONTEXT) == 4 * one
    assert activation_bytes(CONFIG, 1, 2 * CONTEXT) == 2 * one
    assert activation_bytes(CONFIG, 1, CONTEXT, training=False) < one / 2


def test_the_logits_count_three_times():
    wide = replace(CONFIG, vocab_size=1100)
    assert activation_bytes(wide, 1, 1) - activation_bytes(CONFIG, 1, 1) == 3 * 1000 * 4


@pytest.mark.parametrize("precision,bytes_each", [("32-true", 4), ("bf16-mixed", 2), ("bf16-true", 2)])
def test_a_batch_is_refused_where_its_logits_alone_are_too_many(precision: str, bytes_each: int) -> None:
    held = footprint(CONFIG, precision, "adamw")
    need = held.weights_bytes + held.optimizer_bytes + 8 * 32 * (16 + 100 * bytes_each)
    call = (CONFIG, 8, 32, precision, "adamw", True)
    assert batch_refusal(*call, need) is None
    message = batch_refusal(*call, need - 1)
    assert message is not None
    assert "(batch 8 x context 32, vocabulary 100)\nwould fit: " in str(message)


def test_the_batch_that_would_fit_is_the_largest_by_the_estimate() -> None:
    held = footprint(CONFIG, "bf16-mixed", "adamw")
    available = held.weights_bytes + held.optimizer_bytes + activation_bytes(CONFIG, 5, 32, "bf16-mixed")
    message = batch_refusal(CONFIG, 10**6, 32, "bf16-mixed", "adamw", True, available)
    assert message is not None
    assert "would fit: --data.batch_size=5; --check_memory=false" in str(message)
    message = batch_refusal(CONFIG, 1, 10**9, "bf16-mixed", "adamw", True, available)
    assert message is not None
    assert "would fit: a shorter context; " in str(message)
