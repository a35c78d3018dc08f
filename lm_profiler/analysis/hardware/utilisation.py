"""How much of the hardware a step uses: MFU, HFU, rates, and the Transformer's FLOPs on paper."""

from __future__ import annotations

from typing import Literal

CausalAttention = Literal["full", "half"]


def mfu(
    model_flops_per_step: float | None, step_s: float | None, peak_flops_per_s: float | None, devices: int = 1
) -> float | None:
    """Model FLOPs utilisation, a share of the peak (Chowdhery et al. 2022, "PaLM", appendix B).

    Args:
        model_flops_per_step: FLOPs that the model needs, forward and backward, for one step over all devices;
            recomputed activations are not counted.
        step_s: seconds per step.
        peak_flops_per_s: dense peak of one device.
        devices: devices that share the step.

    Returns:
        The share, or None where any figure is unknown.

    Raises:
        ValueError: for a step, a peak or a number of devices that is not positive, or negative FLOPs.
    """
    if model_flops_per_step is None or step_s is None or peak_flops_per_s is None:
        return None
    if model_flops_per_step < 0:
        raise ValueError(f"FLOPs per step must not be negative, got {model_flops_per_step}")
    _positive(step_s=step_s, peak_flops_per_s=peak_flops_per_s, devices=devices)
    return model_flops_per_step / (step_s * peak_flops_per_s * devices)


def hfu(
    hardware_flops_per_step: float | None,
    step_s: float | None,
    peak_flops_per_s: float | None,
    devices: int = 1,
) -> float | None:
    """Hardware FLOPs utilisation: as `mfu`, of all FLOPs done, those recomputed by checkpointing included."""
    return mfu(hardware_flops_per_step, step_s, peak_flops_per_s, devices)


def tokens_per_s(tokens_per_step: float | None, step_s: float | None) -> float | None:
    """Tokens per second, or None where either is unknown; tokens count over all devices.

    Raises:
        ValueError: for a step that is not positive.
    """
    if tokens_per_step is None or step_s is None:
        return None
    _positive(step_s=step_s)
    return tokens_per_step / step_s


def samples_per_s(samples_per_step: float | None, step_s: float | None) -> float | None:
    """Samples (sequences) per second, or None where either is unknown."""
    return tokens_per_s(samples_per_step, step_s)


def transformer_flops_per_token(
    matmul_parameters: int,
    layers: int,
    d_attention: int,
    context: int,
    attention: CausalAttention = "full",
    backward: bool = True,
) -> float:
    """FLOPs of a decoder-only Transformer for one token of training: 6 N + 12 L H Q T.

    PaLM, appendix B (Chowdhery et al. 2022); nanoGPT's estimate_mfu is the same. Left out: norms, rotary
    embedding, softmax, activation functions and the optimizer, which are linear in N with small constants and
    no matrix products.

    Args:
        matmul_parameters: N, weights that multiply: all but the token embedding, the LM head included (`6 N`
            is two FLOPs a weight forward, four backward).
        layers: L.
        d_attention: H Q, heads times head dimension; d_model in the usual Transformer.
        context: T, tokens per sequence.
        attention: "full" counts all T x T scores, as PaLM does and as torch's FlopCounterMode counts them
            even for a causal mask; "half" counts the causal half, about what a fused kernel does.
        backward: False for the forward pass alone, a third.
    """
    seen = context if attention == "full" else context / 2
    forward = 2.0 * matmul_parameters + 4.0 * layers * d_attention * seen
    return 3.0 * forward if backward else forward


def _positive(**figures: float) -> None:
    for name, value in figures.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
