"""What a forward pass of our Transformer leaves for backward, from its dimensions alone: an estimate, without torch.

Counted from what autograd saves in each layer (tests/training/test_activations.py counts it anew). Fused kernels save
less, workspaces and the allocator's gaps come on top.
"""

from __future__ import annotations

from lm_profiler.models.config import TransformerConfig
from lm_profiler.record.precision import full_name
from lm_profiler.training.footprint import bytes_per_weight

_PER_TOKEN = {"32-true": (44, 16), "mixed": (37, 8), "16-bit": (31, 8)}
"""Bytes a token and layer saves, for each of D and of F. Of D: a norm's input, its normed input and its output, twice;
q, k, v, the attention's output and its copy. Of F: gate, its silu, up and their product. A norm computes in float32."""


def activation_bytes(
    config: TransformerConfig,
    batch_size: int,
    context_length: int,
    precision: str | int | None = "32-true",
    training: bool = True,
) -> int:
    """Bytes that activations need at their peak, when the loss has been computed.

    Args:
        config: The model's dimensions, attention and checkpointing.
        batch_size: Sequences at once (B).
        context_length: Tokens in a sequence (T).
        precision: Lightning's name of the precision, such as `bf16-mixed`; None is its default, 32-true.
        training: False for the forward pass alone, which keeps no more than a layer's.

    Raises:
        ValueError: unknown precision.
    """
    size = bytes_per_weight(precision)
    mixed = full_name(precision).endswith("-mixed")
    of_d, of_f = _PER_TOKEN["mixed" if mixed else "16-bit" if size == 2 else "32-true"]
    scale = size / 4 if size == 8 else 1
    scores = config.num_heads * context_length * (2 if mixed else size) if config.attention == "math" else 0
    layer = (of_d * config.d_model + of_f * config.d_ff) * scale + scores
    layers = config.num_layers * layer
    if not training:
        layers = layer
    elif config.activation_checkpointing:
        layers = config.num_layers * config.d_model * size + layer
    logits = 3 * config.vocab_size * size  # the logits, their log-softmax, and the gradient of one of them
    copies = 2 * config.num_parameters() if mixed else 0  # autocast keeps the weights it has cast
    return round(batch_size * context_length * (layers + logits)) + copies
