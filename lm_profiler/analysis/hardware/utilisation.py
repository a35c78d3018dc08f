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
        ValueError: for a step, a peak or a number of devices that is not positive, or negative FLOPs.
    """
    if flops_per_step is None or step_s is None or peak_flops_per_s is None:
        return None
    if flops_per_step < 0:
        raise ValueError(f"FLOPs per step must not be negative, got {flops_per_step}")
    _positive(step_s=step_s, peak_flops_per_s=peak_flops_per_s, devices=devices)
    return flops_per_step / (step_s * peak_flops_per_s * devices)


def per_second(count: float | None, step_s: float | None) -> float | None:
    """``count`` things of a step, over all devices, per second; None where either is unknown.

    Raises:
        ValueError: for a step that is not positive.
    """
    if count is None or step_s is None:
        return None
    _positive(step_s=step_s)
    return count / step_s


def _positive(**figures: float) -> None:
    for name, value in figures.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
