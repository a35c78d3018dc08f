"""Sizes and their rules, known without torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lm_profiler.models.config import PRESETS, TransformerConfig, preset


def test_an_override_changes_one_field_and_none_changes_nothing() -> None:
    changed = preset("large", num_layers=2, d_ff=None, attention="math")
    assert (changed.num_layers, changed.d_ff, changed.d_model, changed.attention) == (2, 5120, 1280, "math")


@pytest.mark.parametrize(
    "override",
    [
        {"d_model": 96},
        {"d_ff": 7},
        {"num_layers": 5},
        {"num_heads": 6},
        {"vocab_size": 11},
        {"rope_theta": 500.0},
        {"attention": "math"},
        {"activation_checkpointing": True},
    ],
    ids=lambda override: next(iter(override)),
)
def test_every_field_of_a_preset_can_be_overridden(override: dict[str, object]) -> None:
    config = preset("small", **override)
    assert {name: getattr(config, name) for name in override} == override


def test_an_unknown_size_lists_the_known_ones() -> None:
    message = r"size: expected one of small, medium, large, xl, 2\.7B, given 'tiny'"
    with pytest.raises(ValueError, match=message):
        preset("tiny")


@pytest.mark.parametrize("name", ["d_model", "d_ff", "num_layers", "num_heads", "vocab_size", "rope_theta"])
@pytest.mark.parametrize("value", [0, -1])
def test_dimensions_are_positive(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: expected a positive number, given {value}$"):
        preset("small", **{name: value})


def test_heads_that_do_not_divide_the_width_are_told_which_would() -> None:
    message = r"num_heads: expected a divisor of d_model \(768\), given 10; take 8 or 12 heads"
    with pytest.raises(ValueError, match=message):
        preset("small", num_heads=10)


def test_a_head_of_odd_width_has_no_pairs_to_turn() -> None:
    with pytest.raises(ValueError, match=r"num_heads: expected an even width per head.*given 12 / 4 = 3;"):
        TransformerConfig(d_model=12, d_ff=24, num_layers=1, num_heads=4)


def test_a_width_that_no_head_count_fits_says_so() -> None:
    with pytest.raises(ValueError, match="change d_model"):
        TransformerConfig(d_model=7, d_ff=24, num_layers=1, num_heads=2)


def test_an_unknown_attention_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="attention: expected one of sdpa, math, given 'flash'"):
        preset("small", attention="flash")


def test_reading_a_size_does_not_import_torch() -> None:
    code = "import sys; import lm_profiler.models.config as c; c.preset('xl'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ), check=False).returncode == 0


def test_the_presets_are_those_of_the_table() -> None:
    table = {
        "small": (768, 3072, 12, 12),
        "medium": (1024, 4096, 24, 16),
        "large": (1280, 5120, 36, 20),
        "xl": (1600, 6400, 48, 25),
        "2.7B": (2560, 10240, 32, 32),
    }
    assert {size: (c.d_model, c.d_ff, c.num_layers, c.num_heads) for size, c in PRESETS.items()} == table
