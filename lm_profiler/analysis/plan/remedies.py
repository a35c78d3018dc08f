"""What would make a run fit: other settings of the same run, each of which is to be rehearsed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from lm_profiler.analysis.plan.planned import Planned

_DIVISORS = 2
"""Smaller batches that are tried: the largest that fits may not, once gradients are held from batch to batch."""


@dataclass(frozen=True)
class Remedy:
    """Options to be added to a call.

    Attributes:
        options: As they are written.
        changes: What it may change in what is learned; empty for nothing.
        is_known: Whether it is known to fit without being rehearsed.
    """

    options: Mapping[str, str]
    changes: str = ""
    is_known: bool = False

    @property
    def words(self) -> list[str]:
        """For a command."""
        return [f"--{name}={value}" for name, value in self.options.items()]


def remedies(planned: Planned, largest_context: int | None = None) -> list[Remedy]:
    """Settings that need less than ``planned``, of those that its call has (its ``settings`` tell which).

    What changes the least of the training goes first.

    Args:
        planned: with the largest batch that fits, if a smaller one is to be among them.
        largest_context: that fits; None where it is unknown.
    """
    return [
        *_kept(planned),
        *_divided(planned),
        *_narrower(planned),
        *_smaller(planned),
        *_other(planned, largest_context),
    ]


def together(planned: Planned) -> list[Remedy]:
    """All at once that leaves the step what it was but for rounding; then whatever needs least."""
    narrower, kept = list(_narrower(planned)), [*_kept(planned), *_accumulated(planned, [1])]
    least = [*narrower[-1:], *kept, *_other(planned, None)]
    return [_all(each) for each in ([*narrower[:1], *kept], least) if len(each) > 1]


def _all(each: Sequence[Remedy]) -> Remedy:
    options = {name: value for remedy in each for name, value in remedy.options.items()}
    return Remedy(options, ", ".join(dict.fromkeys(remedy.changes for remedy in each if remedy.changes)))


def _narrower(planned: Planned) -> Iterator[Remedy]:
    """Whoever asks for float64 needs it, and gets none of these."""
    precision = str(planned.settings.get("trainer.precision") or "32-true")
    if precision in ("32-true", "32"):
        yield Remedy({"trainer.precision": "bf16-mixed"}, "rounding")
    if precision in ("32-true", "32") or precision.endswith("-mixed"):
        yield Remedy({"trainer.precision": "bf16-true"}, "rounding (also of weights)")


def _kept(planned: Planned) -> Iterator[Remedy]:
    """Less is kept for backward."""
    if planned.settings.get("model.activation_checkpointing") is False:
        yield Remedy({"model.activation_checkpointing": "true"})
    if planned.settings.get("model.attention") == "math":
        yield Remedy({"model.attention": "sdpa"}, "rounding")


def _divided(planned: Planned) -> Iterator[Remedy]:
    """Batches that divide the one that was asked for, as often as gives the same global batch."""
    batch = planned.batch or 0
    divisors = (n for n in range(min(planned.largest or 0, batch - 1), 0, -1) if batch % n == 0)
    yield from _accumulated(planned, list(islice(divisors, _DIVISORS)))


def _accumulated(planned: Planned, sizes: Sequence[int]) -> Iterator[Remedy]:
    batch, times = planned.settings.get("data.batch_size"), planned.settings.get("trainer.accumulate_grad_batches") or 1
    if batch is None or batch != planned.batch:  # what the option says is then something else
        return
    for n in sizes:
        if n < batch:
            options = {"data.batch_size": n, "trainer.accumulate_grad_batches": times * batch // n}
            yield Remedy({name: str(value) for name, value in options.items()}, "statistics over a batch")


def _smaller(planned: Planned) -> Iterator[Remedy]:
    """The largest batch that fits."""
    if planned.largest and planned.settings.get("data.batch_size") == planned.batch:
        yield Remedy({"data.batch_size": str(planned.largest)}, "the samples of a step", is_known=True)


def _other(planned: Planned, largest_context: int | None) -> Iterator[Remedy]:
    """What trains something else."""
    if planned.settings.get("model.optimizer") == "adamw":
        yield Remedy({"model.optimizer": "sgd"}, "the optimizer")
    if largest_context and planned.context and largest_context < planned.context:
        yield Remedy({"data.context_length": str(largest_context)}, "the context")
