"""What a forward pass of our Transformer leaves for backward, from its dimensions alone: an estimate, without torch.

Counted from what autograd saves in each layer (tests/training/test_activations.py counts it anew). Fused kernels save
less, workspaces and the allocator's gaps come on top.
"""

from __future__ import annotations

from dataclasses import replace

from lm_profiler.training.fits.states import Plan, Refusal, bytes_per_value, bytes_per_weight, gib

_OF_D = {(8, 8): 88, (4, 4): 44, (4, 2): 37, (2, 2): 31}
"""Bytes that a token and layer save for each of D, by those of a weight and a value: a norm's input, its normed input
and its output, twice; q, k, v, the attention's output and its copy. A norm computes in float32 at least."""

_OF_F = 4
"""Values that they save for each of F: gate, its silu, up and their product."""

_IDS_PER_TOKEN = 16
"""Bytes: a token and its target, int64 each."""


def activation_bytes(plan: Plan) -> int:
    """Bytes that activations need at their peak, when the loss has been computed; without training a layer's."""
    config, weight, value = plan.config, bytes_per_weight(plan.precision), bytes_per_value(plan.precision)
    scores = config.num_heads * plan.context_length * value if config.attention == "math" else 0
    layer = _OF_D[weight, value] * config.d_model + _OF_F * value * config.d_ff + scores
    layers = config.num_layers * layer
    if not plan.training:
        layers = layer
    elif config.activation_checkpointing:
        layers = config.num_layers * config.d_model * weight + layer
    logits = 3 * config.vocab_size * weight  # the logits, their log-softmax, and the gradient of one of them
    copies = 2 * config.num_parameters() if value < weight else 0  # autocast keeps the weights it has cast
    return plan.batch_size * plan.context_length * (layers + logits) + copies


def batch_refusal(plan: Plan, available_bytes: int) -> Refusal | None:
    """Why one batch cannot fit beside the weights, and what would; None if what is certain does fit.

    Certain are the weights, the optimizer's states, the token ids and one copy of the logits; what would fit is
    reckoned by ``activation_bytes``.
    """
    batch_size, context_length, vocab_size = plan.batch_size, plan.context_length, plan.config.vocab_size
    batch_bytes = batch_size * context_length * (_IDS_PER_TOKEN + vocab_size * bytes_per_value(plan.precision))
    room = available_bytes - plan.weights_bytes - plan.optimizer_bytes
    if batch_bytes <= room:
        return None
    fixed, with_one = (activation_bytes(replace(plan, batch_size=n)) for n in (0, 1))
    sequences = (room - fixed) // (with_one - fixed)
    return Refusal(
        f"memory: expected at most the {gib(room)} that are free beside the model, given {gib(batch_bytes)} of "
        f"token ids and logits (batch {batch_size:,} x context {context_length:,}, vocabulary {vocab_size:,})",
        [f"--data.batch_size={sequences}"] if sequences > 0 else [],
        "a shorter context",
    )
