"""The bytes that a model holds before any activation: known from its dimensions alone."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple, get_args

from lm_profiler.models.config import PRESETS, TransformerConfig
from lm_profiler.record.precision import full_name

OptimizerName = Literal["adamw", "sgd", "none"]

BYTES_PER_WEIGHT: dict[str, int] = {
    "64-true": 8,
    "32-true": 4,
    # Autocast computes in 16 bits, yet the weights, and so their gradients and optimizer states, stay in 32.
    "16-mixed": 4,
    "bf16-mixed": 4,
    "16-true": 2,
    "bf16-true": 2,
}
"""By Lightning's name of the precision."""

STATES_PER_WEIGHT: dict[OptimizerName, int] = {"adamw": 2, "sgd": 0, "none": 0}
"""AdamW keeps two moments of each weight, in the weight's dtype; SGD without momentum keeps nothing."""


@dataclass(frozen=True)
class Footprint:
    """Bytes on one device, unsharded: a lower bound, without activations, workspaces and DDP's buckets."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        """The sum of the three."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


@dataclass(frozen=True)
class Refusal:
    """Why a run cannot fit, and the options that would make it fit; as text, two lines.

    Args:
        reason: In a line.
        remedies: Options to add to the call, each alternative enough by itself.
        otherwise: What to say where there are none.
    """

    reason: str
    remedies: Sequence[str]
    otherwise: str

    def __str__(self) -> str:
        fitting = " or ".join(self.remedies) or self.otherwise
        return f"{self.reason}\nwould fit: {fitting}; --check_memory=false to run anyway"


def footprint(
    config: TransformerConfig,
    precision: str | int | None = "32-true",
    optimizer: OptimizerName = "adamw",
    training: bool = True,
) -> Footprint:
    """What the weights, gradients and optimizer states of `config` need, in bytes.

    AdamW's step count, 4 bytes a parameter tensor, is left out.

    Args:
        config: The model's dimensions.
        precision: Lightning's name of the precision, such as `bf16-mixed`; None is its default, 32-true.
        optimizer: `adamw`, `sgd` (without momentum) or `none`.
        training: False for validate, test and predict, which hold the weights alone.

    Raises:
        ValueError: unknown precision or optimizer.
    """
    if optimizer not in STATES_PER_WEIGHT:
        names = ", ".join(get_args(OptimizerName))
        raise ValueError(f"optimizer: expected one of {names}, given {optimizer!r}")
    weights_bytes = config.num_parameters() * bytes_per_weight(precision)
    if not training:
        return Footprint(weights_bytes, 0, 0)
    return Footprint(weights_bytes, weights_bytes, STATES_PER_WEIGHT[optimizer] * weights_bytes)


def bytes_per_weight(precision: str | int | None) -> int:
    name = full_name(precision)
    if name not in BYTES_PER_WEIGHT:
        raise ValueError(f"precision: expected one of {', '.join(BYTES_PER_WEIGHT)}, given {precision!r}")
    return BYTES_PER_WEIGHT[name]


def bytes_per_value(precision: str | int | None) -> int:
    """Of what matrix products compute: under autocast half precision, else the weights' own."""
    size = bytes_per_weight(precision)
    return 2 if full_name(precision).endswith("-mixed") else size


def refusal(
    config: TransformerConfig,
    precision: str | int | None,
    optimizer: OptimizerName,
    training: bool,
    available_bytes: int,
    copies: int = 1,
) -> Refusal | None:
    """Why a run cannot fit, and what would; None if its known bytes do fit.

    Args:
        config: The model's dimensions.
        precision: Lightning's name of the precision.
        optimizer: `adamw`, `sgd` or `none`.
        training: False for validate, test and predict.
        available_bytes: What the device has free.
        copies: Replicas that share the device's memory.
    """
    need = footprint(config, precision, optimizer, training)
    if need.total_bytes * copies <= available_bytes:
        return None
    parts = f"weights {gib(need.weights_bytes)}"
    if training:
        parts += f", gradients {gib(need.gradients_bytes)}, optimizer states {gib(need.optimizer_bytes)}"
    times = f" x {copies} processes" if copies > 1 else ""
    remedies = _remedies(config, precision, optimizer, training, available_bytes // copies)
    if need.total_bytes <= available_bytes:
        remedies.insert(0, "--trainer.devices=1")
    return Refusal(
        f"memory: expected at most the {gib(available_bytes)} that are free, given {gib(need.total_bytes)}{times} "
        f"before any activation ({parts}; {precision}, optimizer {optimizer})",
        remedies,
        "no preset, in any precision",
    )


def _remedies(
    config: TransformerConfig,
    precision: str | int | None,
    optimizer: OptimizerName,
    training: bool,
    room: int,
) -> list[str]:
    """Options to add, each alternative enough by itself: the same model held in less, then a smaller one."""

    def fits(other: TransformerConfig, how: _Held) -> bool:
        return footprint(other, how.precision, how.optimizer, training).total_bytes <= room

    held = _held_in_less(_Held((), precision, optimizer), training)
    enough = [how for how in held if fits(config, how)]
    options = [how.options for how in enough if not any(set(x.options) < set(how.options) for x in enough)]
    for how in (held[0], held[-1]):  # as it was asked for, or else as sparingly as can be
        if smaller := _smaller(config, partial(fits, how=how)):
            options.append((smaller, *how.options))
            break
    return [" ".join(each) for each in options]


class _Held(NamedTuple):
    options: tuple[str, ...]
    precision: str | int | None
    optimizer: OptimizerName


def _held_in_less(given: _Held, training: bool) -> list[_Held]:
    """Ways to hold the same model, from `given` to the one that needs least."""
    ways = [given]
    if training and STATES_PER_WEIGHT[given.optimizer]:
        ways.append(_Held(("--model.optimizer=sgd",), given.precision, "sgd"))
    if bytes_per_weight(given.precision) > BYTES_PER_WEIGHT["bf16-true"]:
        option = "--trainer.precision=bf16-true"
        ways += [_Held((option, *way.options), "bf16-true", way.optimizer) for way in ways]
    return ways


def _smaller(config: TransformerConfig, fits: Callable[[TransformerConfig], bool]) -> str | None:
    """The option that turns `config` into the largest smaller model that `fits`.

    That is a smaller preset where `config` has a preset's dimensions: options that override single dimensions would
    still do so in another preset. Elsewhere it is fewer layers.
    """
    presets = {size: replace(preset, vocab_size=config.vocab_size) for size, preset in PRESETS.items()}
    if any(_dimensions(preset) == _dimensions(config) for preset in presets.values()):
        sizes = [size for size, preset in presets.items() if fits(preset)]
        return f"--model.size={sizes[-1]}" if sizes else None
    layers = bisect_left(range(1, config.num_layers), True, key=lambda n: not fits(replace(config, num_layers=n)))
    return f"--model.num_layers={layers}" if layers else None


def _dimensions(config: TransformerConfig) -> tuple[int, ...]:
    return config.d_model, config.d_ff, config.num_layers, config.num_heads


def gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
