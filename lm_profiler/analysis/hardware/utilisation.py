"""How much of the hardware a step uses: MFU, HFU and rates."""

from __future__ import annotations


def share_of_peak(
    flops_per_step: float | None, step_s: float | None, peak_flops_per_s: float | None, devices: int = 1
) -> float | None:
    """MFU or HFU, by which FLOPs are counted (Chowdhery et al. 2022, "PaLM", appendix B).

    Args:
        flops_per_step: of one step over all devices: what the model needs, forward and backward (MFU), or with them
            what activation checkpointing computes again (HFU).
        step_s: seconds per step.
        peak_flops_per_s: dense peak of one device.
        devices: devices that share the step.

    Returns:
        The share, or None where any figure is unknown.

    Raises:
        ValueError: for a peak that is not positive.
    """
    if flops_per_step is None or step_s is None or peak_flops_per_s is None:
        return None
    if not peak_flops_per_s > 0:
        raise ValueError(f"peak_flops_per_s must be positive, got {peak_flops_per_s}")
    return flops_per_step / (step_s * peak_flops_per_s * devices)


def per_second(count: float | None, step_s: float | None) -> float | None:
    """``count`` things of a step, over all devices, per second; None where either is unknown."""
    return None if count is None or step_s is None else count / step_s
