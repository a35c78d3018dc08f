"""MFU, rates and FLOPs on paper against figures worked by hand."""

import pytest

from lm_profiler.analysis import hfu, mfu, samples_per_s, tokens_per_s, transformer_flops_per_token


def test_mfu_of_a_worked_example():
    # 156 TFLOP in half a second is 312 TFLOP/s: all of one A100, a quarter of four.
    assert mfu(156e12, 0.5, 312e12) == pytest.approx(1.0)
    assert mfu(156e12, 0.5, 312e12, devices=4) == pytest.approx(0.25)
    assert hfu(208e12, 1.0, 312e12) == pytest.approx(2 / 3)


def test_palm_540b_as_published():
    """PaLM, table 3 and appendix B: 238.3k tokens/s on 6144 TPU v4 (275 TFLOP/s) is an MFU of 46.2 %."""
    per_token = transformer_flops_per_token(540_350_000_000, 118, 48 * 256, 2048)
    assert mfu(per_token * 238_300, 1.0, 275e12, devices=6144) == pytest.approx(0.462, abs=0.001)


@pytest.mark.parametrize("missing", range(3))
def test_unknown_in_unknown_out(missing):
    figures = [1e12, 0.1, 1e14]
    figures[missing] = None
    assert mfu(*figures) is None
    assert hfu(*figures) is None


def test_rates():
    assert tokens_per_s(2048, 0.5) == 4096
    assert samples_per_s(4, 0.5) == 8
    assert tokens_per_s(None, 0.5) is None
    assert tokens_per_s(2048, None) is None


@pytest.mark.parametrize("call", [lambda: mfu(1.0, 0.0, 1.0), lambda: mfu(1.0, 1.0, -1.0), lambda: tokens_per_s(1, 0)])
def test_impossible_figures_are_refused(call):
    with pytest.raises(ValueError, match="must be positive"):
        call()
    with pytest.raises(ValueError, match="must not be negative"):
        mfu(-1.0, 1.0, 1.0)


def test_flops_per_token_add_up_product_by_product():
    """One layer, counted matrix by matrix: 2 FLOPs a multiply-add, forward once, backward twice."""
    d, ff, vocabulary, context = 8, 32, 100, 16
    weights = 4 * d * d + 3 * d * ff + d * vocabulary
    scores_and_values = 2 * (2 * context * d)  # q k^T and p v, for one token
    forward = 2 * weights + scores_and_values
    assert transformer_flops_per_token(weights, 1, d, context, backward=False) == forward
    assert transformer_flops_per_token(weights, 1, d, context) == 3 * forward
    assert transformer_flops_per_token(weights, 1, d, context) == 6 * weights + 12 * d * context


def test_half_attention_halves_attention_alone():
    full = transformer_flops_per_token(1000, 2, 8, 16)
    half = transformer_flops_per_token(1000, 2, 8, 16, attention="half")
    assert full - half == 6 * 2 * 8 * 16
    assert transformer_flops_per_token(1000, 2, 8, 0) == 6000
