"""The bytes that a model holds before any activation: known from its dimensions alone."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lm_profiler.models.config import PRESETS, TransformerConfig
from lm_profiler.record.precision import full_name
from lm_profiler.usage_error import expect_one_of

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
class Plan:
    """What decides how much memory a run of our own model needs on one device, unsharded.

    The bytes are a lower bound: without activations, workspaces, DDP's buckets, and AdamW's step count (4 bytes a
    parameter tensor).

    Args:
        config: The model's dimensions, attention and checkpointing.
        precision: Lightning's name of the precision, such as `bf16-mixed`; None is its default, 32-true.
        optimizer: `adamw`, `sgd` (without momentum) or `none`.
        training: False for validate, test and predict, which hold the weights alone.
        batch_size: Sequences at once (B).
        context_length: Tokens in a sequence (T).

    Raises:
        UsageError: unknown precision or optimizer.
    """

    config: TransformerConfig
    precision: str | int | None = "32-true"
    optimizer: OptimizerName = "adamw"
    training: bool = True
    batch_size: int = 1
    context_length: int = 1

    def __post_init__(self) -> None:
        bytes_per_weight(self.precision)
        expect_one_of(STATES_PER_WEIGHT, "optimizer", self.optimizer)

    @property
    def weights_bytes(self) -> int:
        return self.config.num_parameters() * bytes_per_weight(self.precision)

    @property
    def gradients_bytes(self) -> int:
        return self.weights_bytes if self.training else 0

    @property
    def optimizer_bytes(self) -> int:
        return STATES_PER_WEIGHT[self.optimizer] * self.gradients_bytes

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


def bytes_per_weight(precision: str | int | None) -> int:
    name = full_name(precision)
    expect_one_of(BYTES_PER_WEIGHT, "precision", name)
    return BYTES_PER_WEIGHT[name]


def bytes_per_value(precision: str | int | None) -> int:
    """Of what matrix products compute: under autocast half precision, else the weights' own."""
    size = bytes_per_weight(precision)
    return 2 if full_name(precision).endswith("-mixed") else size


def refusal(plan: Plan, available_bytes: int, copies: int = 1) -> Refusal | None:
    """Why a run cannot fit, and what would; None if its known bytes do fit.

    Args:
        plan: Of one replica.
        available_bytes: What the device has free.
        copies: Replicas that share the device's memory.
    """
    if plan.total_bytes * copies <= available_bytes:
        return None
    parts = f"weights {gib(plan.weights_bytes)}"
    if plan.training:
        parts += f", gradients {gib(plan.gradients_bytes)}, optimizer states {gib(plan.optimizer_bytes)}"
    times = f" x {copies} processes" if copies > 1 else ""
    remedies = _remedies(plan, available_bytes // copies)
    if plan.total_bytes <= available_bytes:
        remedies.insert(0, "--trainer.devices=1")
    return Refusal(
        f"memory: expected at most the {gib(available_bytes)} that are free, given {gib(plan.total_bytes)}{times} "
        f"before any activation ({parts}; {plan.precision}, optimizer {plan.optimizer})",
        remedies,
        "no preset, in any precision",
    )


def _remedies(plan: Plan, room: int) -> list[str]:
    """Options to add, each alternative enough by itself: the same model held in less, then a smaller one."""
    ways = _held_in_less(plan)
    enough = [options for options, how in ways if how.total_bytes <= room]
    remedies = [options for options in enough if not any(set(other) < set(options) for other in enough)]
    for options, how in (ways[0], ways[-1]):  # as it was asked for, or else as sparingly as can be
        if smaller := _smaller(how, room):
            remedies.append((smaller, *options))
            break
    return [" ".join(options) for options in remedies]


def _held_in_less(plan: Plan) -> list[tuple[tuple[str, ...], Plan]]:
    """Ways to hold the same model, from that of `plan` to the one that needs least."""
    ways: list[tuple[tuple[str, ...], Plan]] = [((), plan)]
    if plan.training and STATES_PER_WEIGHT[plan.optimizer]:
        ways.append((("--model.optimizer=sgd",), replace(plan, optimizer="sgd")))
    if bytes_per_weight(plan.precision) > BYTES_PER_WEIGHT["bf16-true"]:
        option = "--trainer.precision=bf16-true"
        ways += [((option, *options), replace(how, precision="bf16-true")) for options, how in ways]
    return ways


def _smaller(plan: Plan, room: int) -> str | None:
    """The option that turns `plan` into that of the largest smaller model that fits into `room`.

    That is a smaller preset where it has a preset's dimensions: options that override single dimensions would still do
    so in another preset. Elsewhere it is fewer layers.
    """

    def fits(config: TransformerConfig) -> bool:
        return replace(plan, config=config).total_bytes <= room

    config = plan.config
    presets = {size: replace(preset, vocab_size=config.vocab_size) for size, preset in PRESETS.items()}
    if any(_dimensions(preset) == _dimensions(config) for preset in presets.values()):
        sizes = [size for size, preset in presets.items() if fits(preset)]
        return f"--model.size={sizes[-1]}" if sizes else None
    layers = bisect_left(range(1, config.num_layers), True, key=lambda n: not fits(replace(config, num_layers=n)))
    return f"--model.num_layers={layers}" if layers else None


def _dimensions(config: TransformerConfig) -> tuple[int, ...]:
    return config.d_model, config.d_ff, config.num_layers, config.num_heads


def halves(number: int) -> Sequence[int]:
    """Half of it, half of that, and so on down to 1."""
    return [number >> shift for shift in range(1, number.bit_length())]


def gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
