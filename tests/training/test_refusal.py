"""What a refusal says is needed, and that each remedy it prints is one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lm_profiler.models.config import PRESETS, TransformerConfig
from lm_profiler.training.fits.states import Plan, Refusal, refusal

GIB = 2**30


def remedies(refused: Refusal) -> list[list[str]]:
    """The alternatives, each a list of options; the text says the same."""
    second = str(refused).splitlines()[1]
    told = second.removeprefix("would fit: ").removesuffix("; --check_memory=false to run anyway")
    assert told == (" or ".join(refused.remedies) or "no preset, in any precision")
    return [options.split() for options in refused.remedies]


def asked(available_bytes: int, copies: int, **plan: Any) -> Refusal | None:
    return refusal(Plan(**plan), available_bytes, copies)


def applied(options: list[str], call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `asked` after pasting `options`."""
    call = dict(call)
    for option in options:
        key, _, value = option.partition("=")
        if key == "--model.size":
            call["config"] = replace(PRESETS[value], vocab_size=call["config"].vocab_size)
        elif key == "--model.num_layers":
            call["config"] = replace(call["config"], num_layers=int(value))
        else:
            names = {
                "--trainer.precision": "precision",
                "--model.optimizer": "optimizer",
                "--trainer.devices": "copies",
            }
            call[names[key]] = int(value) if key == "--trainer.devices" else value
    return call


CONFIGS = [*PRESETS.values(), replace(PRESETS["xl"], vocab_size=200_000), replace(PRESETS["large"], num_layers=90)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.d_model}x{config.num_layers}")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true", "16", None])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "none"])
@pytest.mark.parametrize("training", [True, False])
def test_every_remedy_is_one(config: TransformerConfig, precision: Any, optimizer: Any, training: bool) -> None:
    need = Plan(config, precision, optimizer, training).total_bytes
    found = 0
    for copies in (1, 2):
        for share in (0.999, 0.6, 0.4, 0.2, 0.05, 0.001):
            call: dict[str, Any] = {"config": config, "precision": precision, "optimizer": optimizer}
            call |= {"training": training, "copies": copies, "available_bytes": int(need * copies * share)}
            refused = asked(**call)
            assert refused is not None
            for options in remedies(refused):
                assert asked(**applied(options, call)) is None, (refused, options)
                found += 1
    assert found >= 1


def test_what_just_fits_is_not_refused() -> None:
    need = Plan(PRESETS["xl"]).total_bytes
    assert refusal(Plan(PRESETS["xl"], "32-true", "adamw", True), need) is None
    assert refusal(Plan(PRESETS["xl"], "32-true", "adamw", True), need - 1) is not None
    assert refusal(Plan(PRESETS["xl"], "32-true", "adamw", True), 2 * need - 1, copies=2) is not None


def test_it_says_what_is_needed_what_there_is_and_several_ways_out() -> None:
    refused = refusal(Plan(PRESETS["xl"], "bf16-mixed", "adamw", True), 24 * GIB)
    assert refused is not None
    assert str(refused) == (
        "memory: expected at most the 24.0 GiB that are free, given 29.8 GiB before any activation "
        "(weights 7.4 GiB, gradients 7.4 GiB, optimizer states 14.9 GiB; bf16-mixed, optimizer adamw)\n"
        "would fit: --model.optimizer=sgd or --trainer.precision=bf16-true or --model.size=large; "
        "--check_memory=false to run anyway"
    )


def test_without_training_only_the_weights_count() -> None:
    refused = refusal(Plan(PRESETS["2.7B"], "32-true", "adamw", False), 10 * GIB)
    assert refused is not None
    assert "given 12.7 GiB before any activation (weights 12.7 GiB;" in refused.reason
    assert remedies(refused) == [["--trainer.precision=bf16-true"], ["--model.size=xl"]]


def test_replicas_on_one_machine_share_its_memory() -> None:
    refused = refusal(Plan(PRESETS["small"], "32-true", "adamw", True), 3 * GIB, copies=2)
    assert refused is not None
    assert "given 1.9 GiB x 2 processes" in refused.reason
    assert remedies(refused)[0] == ["--trainer.devices=1"]


def test_a_model_of_its_own_dimensions_is_given_fewer_layers() -> None:
    custom = replace(PRESETS["small"], d_model=4096, num_layers=64, num_heads=32)
    refused = refusal(Plan(custom, "bf16-true", "sgd", True), 4 * GIB)
    assert refused is not None
    ((option,),) = remedies(refused)
    layers = int(option.removeprefix("--model.num_layers="))
    fits, next_one = (replace(custom, num_layers=n) for n in (layers, layers + 1))
    assert Plan(fits, "bf16-true", "sgd").total_bytes <= 4 * GIB
    assert Plan(next_one, "bf16-true", "sgd").total_bytes > 4 * GIB


def test_where_nothing_fits_it_says_so() -> None:
    refused = refusal(Plan(PRESETS["small"], "32-true", "adamw", True), 1000)
    assert refused is not None
    assert "would fit: no preset, in any precision;" in str(refused)
