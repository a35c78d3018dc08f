"""MFU and rates against figures worked by hand."""

import pytest

from lm_profiler.analysis.hardware.utilisation import per_second, share_of_peak


def test_mfu_of_a_worked_example():
    # 156 TFLOP in half a second is 312 TFLOP/s: all of one A100, a quarter of four.
    assert share_of_peak(156e12, 0.5, 312e12) == pytest.approx(1.0)
    assert share_of_peak(156e12, 0.5, 312e12, devices=4) == pytest.approx(0.25)
    assert share_of_peak(208e12, 1.0, 312e12) == pytest.approx(2 / 3)


def test_palm_540b_as_published():
    """PaLM, table 3 and appendix B: 238.3k tokens/s on 6144 TPU v4 (275 TFLOP/s) is an MFU of 46.2 %."""
    per_token = 6 * 540_350_000_000 + 12 * 118 * 48 * 256 * 2048  # 6 N + 12 L H Q T
    assert share_of_peak(per_token * 238_300, 1.0, 275e12, devices=6144) == pytest.approx(0.462, abs=0.001)


@pytest.mark.parametrize("missing", range(3))
def test_unknown_in_unknown_out(missing):
    figures = [1e12, 0.1, 1e14]
    figures[missing] = None
    assert share_of_peak(*figures) is None


def test_rates():
    assert per_second(2048, 0.5) == 4096
    assert per_second(None, 0.5) is None
    assert per_second(2048, None) is None


def test_an_impossible_peak_is_refused():
    with pytest.raises(ValueError, match="must be positive"):
        share_of_peak(1.0, 1.0, -1.0)
