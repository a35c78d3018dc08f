"""Sizes and their rules, known without torch."""

import pytest
from raised import refusal
from stored_texts import assert_stored

from lm_profiler.models.config import PRESETS, ambiguous_size_notes, preset, size_notes
from lm_profiler.usage_error import UsageError


def test_every_field_of_a_preset_can_be_overridden() -> None:
    overrides: dict[str, object] = {
        "d_model": 96, "d_ff": 7, "num_layers": 5, "num_heads": 6, "vocab_size": 11, "rope_theta": 500.0,
        "attention": "math", "activation_checkpointing": True, "checkpoint_every": (4, 2), "num_kv_heads": 4,
        "head_width": 32, "qk_norm": True, "tied_embeddings": True, "num_experts": 4, "architecture": "gpt2",
    }  # fmt: skip
    for name, value in overrides.items():
        assert getattr(preset("small", **{name: value}), name) == value
        assert preset("small", **{name: None}) == PRESETS["small"]
    assert preset("small", checkpoint_every=(5, 3)).checkpoints == (5, 3)  # which need not divide the layers
    assert preset("small", activation_checkpointing=True).checkpoints == (1,)


DIMENSIONS = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size", "rope_theta")


@pytest.mark.parametrize(
    "options, message",
    [
        *(({name: 0}, rf"{name}: expected a positive number, given 0") for name in DIMENSIONS),
        ({"d_model": -1}, r"d_model: expected a positive number, given -1"),
        ({"num_heads": 10}, r"num_heads: expected a divisor of d_model / 2 \(384\), .*, given 10"),
        ({"d_model": 7, "num_heads": 2}, r"num_heads: expected a divisor of .*"),  # no pairs for RoPE
        ({"attention": "flash"}, r"attention: expected sdpa, math or package.module:function, given 'flash'"),
        *(({"checkpoint_every": every}, r"checkpoint_every: .*") for every in ((0,), (13,), (4, 13), (2, 2), (2, 4))),
        ({"num_kv_heads": 5}, r"num_kv_heads: expected a divisor of num_heads \(12\), given 5"),
        ({"num_kv_heads": 0}, r"num_kv_heads: expected a divisor of num_heads \(12\), given 0"),
        ({"head_width": 33}, r"head_width: expected an even positive number, since RoPE rotates pairs, given 33"),
        ({"num_experts": -1}, r"num_experts: expected 0 \(none\) or more, given -1"),
        ({"num_experts": 4, "experts_per_token": 5}, r"experts_per_token: expected 1 to num_experts \(4\), given 5"),
        ({"num_experts": 4, "experts_per_token": 0}, r"experts_per_token: expected 1 to num_experts \(4\), given 0"),
        (
            {"num_experts": 4, "architecture": "gpt2"},
            r"num_experts: expected 0 for this architecture \(gpt2\), given 4",
        ),
    ],
    ids=str,
)
def test_inconsistent_sizes_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}$"):
        preset("small", **options)


def test_only_an_ambiguous_name_is_noted() -> None:
    assert_stored("models/refused: size", {"tiny": refusal(UsageError, lambda: preset("tiny"))})
    assert ambiguous_size_notes([size for size in PRESETS if size not in ("xl", "2.7B")]) == []
    [line] = ambiguous_size_notes(["xl", "small", "xl", "no such size"])
    [other] = ambiguous_size_notes(["2.7B"])
    assert_stored("models/meanings", {"xl": line, "2.7B": other})


def test_a_size_with_other_dimensions_is_not_called_that_model() -> None:
    given = {"size": "xl", "d_model": 64, "d_ff": None, "num_layers": 2}
    [line] = size_notes(given, is_on_command_line=True)
    assert "1600" not in line
    assert line.endswith("d_model 64, num_layers 2")
    assert size_notes(given | {"size": "huge"}, is_on_command_line=True) == []  # which is refused
    assert size_notes(given, is_on_command_line=False) == []  # a config of its own, such as demo
    assert size_notes({"size": "xl", "d_model": None}, is_on_command_line=True) == ambiguous_size_notes(["xl"])
