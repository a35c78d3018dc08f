"""The bytes that attention alone cannot do without: known from its dimensions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lm_profiler.models.config import AttentionName
from lm_profiler.training.fits.states import Refusal, bytes_per_value, bytes_per_weight, gib, halves

_SCORES = 3
"""Arrays [B, T, T] that `math` holds at once: the scores, the masked scores and their softmax. Measured on the CPU:
3.1 in fp32 and bf16, forward and backward. torch.compile needs one at least."""


@dataclass(frozen=True)
class AttentionFootprint:
    """What one cell of attention alone needs on one device: a lower bound.

    Left out: the output and its gradient, workspaces, and under autocast the softmax in float32.

    Args:
        batch_size: Sequences at once (B).
        context_length: Tokens in a sequence (T).
        d_model: Width of Q, K and V (D).
        attention: `sdpa` never holds an array [B, T, T] here; `math` does.
        compile: Whether torch.compile fuses it.
        precision: Lightning's name of the precision, such as `bf16-mixed`; None is its default, 32-true.
        training: False for the forward pass alone.
    """

    batch_size: int
    context_length: int
    d_model: int
    attention: AttentionName
    compile: bool
    precision: str | int | None
    training: bool

    @property
    def inputs_bytes(self) -> int:
        """Q, K and V."""
        return 3 * self.batch_size * self.context_length * self.d_model * bytes_per_weight(self.precision)

    @property
    def scores_bytes(self) -> int:
        """Of the arrays [B, T, T] that exist at once."""
        if self.attention != "math":
            return 0
        arrays = 1 if self.compile else _SCORES
        return arrays * self.batch_size * self.context_length**2 * bytes_per_value(self.precision)

    @property
    def total_bytes(self) -> int:
        """Gradients of Q, K and V come when all but one of the scores' arrays have gone."""
        return self.inputs_bytes + max(self.scores_bytes, self.inputs_bytes if self.training else 0)

    def refusal(self, available_bytes: int) -> Refusal | None:
        """Why it cannot run in `available_bytes`, and what would; None if its known bytes fit."""
        if self.total_bytes <= available_bytes:
            return None
        return Refusal(
            f"memory: expected at most the {gib(available_bytes)} that are free, given {gib(self.total_bytes)} "
            f"(Q, K and V {gib(self.inputs_bytes)}, scores {gib(self.scores_bytes)}; {self.attention}, "
            f"{self.precision})",
            self._remedies(available_bytes),
            "no context or batch of any size",
        )

    def _remedies(self, available_bytes: int) -> list[str]:
        """Options to add, each enough by itself."""

        def fits(**changes: Any) -> bool:
            return replace(self, **changes).total_bytes <= available_bytes

        options = ["--model.attention=sdpa"] if fits(attention="sdpa") else []
        for name in ("context_length", "batch_size"):
            options += [f"--data.{name}={n}" for n in halves(getattr(self, name)) if fits(**{name: n})][:1]
        return options
