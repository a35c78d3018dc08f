"""Finds optimizers by name: torch's AdamW and SGD, or any class, which is checked on a small problem before timing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import (
    SGD,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
)

from lm_profiler.models.transformer import imported
from lm_profiler.usage_error import UsageError, expect, expect_one_of

NO_OPTIMIZER = "none"
_CLASSES: dict[str, type[Optimizer]] = {"adamw": AdamW, "sgd": SGD}
MUON = "muon"  # with AdamW: see ``muon``
NAMES = (*_CLASSES, MUON, NO_OPTIMIZER)

# The optimizers of torch that a class may implement, the longest name first, so that AdamW is not taken for Adam.
_REFERENCES = sorted(
    (AdamW, Adam, SGD, Adagrad, Adamax, NAdam, RAdam, RMSprop),
    key=lambda known: -len(known.__name__),
)

# The check takes a few steps with parameters of these shapes and random gradients.
_SHAPES = ((5, 3), (7,))
_STEPS = 5
# With these values a missing decay changes an update by 10 %. The order of decay and update, in which textbooks differ,
# changes it by 0.01 %.
_LEARNING_RATE = 1e-3
_WEIGHT_DECAY = 0.1
_TOLERANCE = 1e-3  # as a share of the largest update


def check_name(name: str) -> None:
    """Raise UsageError unless ``name`` is one of ``NAMES``, or the ``package.module:Class`` of an optimizer."""
    if ":" not in name:
        expect_one_of((*NAMES, "package.module:Class"), "optimizer", name)
        return
    optimizer_class(name)


def optimizer_class(name: str) -> type[Optimizer]:
    """Return the class of the optimizer called ``name``."""
    if name in _CLASSES:
        return _CLASSES[name]
    user_class = imported("optimizer", "a class", name)
    is_optimizer = isinstance(user_class, type) and issubclass(user_class, Optimizer)
    expect(is_optimizer, "optimizer", "a subclass of torch.optim.Optimizer", name)
    return user_class  # type: ignore[no-any-return]


def optimizer_options(
    chosen_class: type[Optimizer], lr: float, weight_decay: float
) -> dict[str, Any]:
    """Return the options that ``chosen_class`` accepts; a class that wraps another (``optimizer_cls``) gets AdamW."""
    parameters = signature(chosen_class).parameters
    takes_any = any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    options: dict[str, Any] = {}
    for option, value in (("lr", lr), ("weight_decay", weight_decay)):
        if takes_any or option in parameters:
            options[option] = value
    if "optimizer_cls" in parameters:
        options["optimizer_cls"] = AdamW
    return options


def check_optimizer(name: str) -> None:
    """Compare the updates of a user's class with those of torch's class of the same name, for the same gradients.

    A class with another name only has to move the parameters to finite numbers. A class that wraps another optimizer
    may need a process group, and is not checked.

    Raises:
        UsageError: the class fails, or its updates differ.
    """
    if name in NAMES:
        return
    chosen_class = optimizer_class(name)
    options = optimizer_options(chosen_class, _LEARNING_RATE, _WEIGHT_DECAY)
    if "optimizer_cls" in options:
        return
    try:
        optimizer = chosen_class(_parameters(), **options)
        updates = _parameter_updates(optimizer)
    except Exception as error:  # a user's class may raise anything
        raise UsageError(
            f"optimizer: {name} cannot step: {type(error).__name__}: {error}"
        ) from error
    reference = _reference_class(chosen_class)
    if reference is None:
        expect(
            all(map(_is_finite_move, updates)),
            "optimizer",
            f"{name} to change all parameters to finite numbers",
            "unchanged parameters, or numbers that are not finite",
        )
        return
    shared_options = _shared_options(optimizer.defaults, reference)
    truths = _parameter_updates(reference(_parameters(), **shared_options))
    error_share = _largest_error(updates, truths)
    if error_share > _TOLERANCE:
        raise UsageError(
            f"optimizer: expected {name} to make the same steps as torch's {reference.__name__}, within "
            f"{_TOLERANCE:g} of the "
            f"largest update, given a difference of {error_share:.3g} after {_STEPS} steps"
        )


def _is_finite_move(update: Tensor) -> bool:
    """Return whether a parameter has moved, and to finite numbers."""
    return bool(torch.isfinite(update).all()) and bool(update.any())


def _largest_error(updates: Sequence[Tensor], truths: Sequence[Tensor]) -> float:
    """Return the largest difference of the updates from the true ones, as a share of the largest true update."""
    largest_truth = max(float(truth.abs().max()) for truth in truths)
    errors = []
    for update, truth in zip(updates, truths, strict=True):
        errors.append(float((update - truth).abs().max()))
    return max(errors) / largest_truth


def _parameters() -> list[nn.Parameter]:
    """Return parameters with the same random values in each call."""
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        for shape in _SHAPES
    ]


def _parameter_updates(optimizer: Optimizer) -> list[Tensor]:
    """Take ``_STEPS`` steps with random gradients, and return by how much each parameter changed."""
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    starts = [parameter.detach().clone() for parameter in parameters]
    generator = torch.Generator().manual_seed(1)
    for _ in range(_STEPS):
        for parameter in parameters:
            parameter.grad = torch.randn(
                parameter.shape, generator=generator, dtype=parameter.dtype
            )
        optimizer.step()
    return [
        parameter.detach() - start
        for parameter, start in zip(parameters, starts, strict=True)
    ]


def _reference_class(chosen_class: type[Optimizer]) -> type[Optimizer] | None:
    """Return the class of torch whose name is in that of ``chosen_class``; None if there is none."""
    lower_name = chosen_class.__name__.lower()
    for reference in _REFERENCES:
        if reference.__name__.lower() in lower_name:
            return reference
    return None


def _shared_options(
    defaults: Mapping[str, Any], reference: type[Optimizer]
) -> dict[str, Any]:
    """Return the options of the user's optimizer that ``reference`` accepts too: betas, momentum, …"""
    names = signature(reference).parameters
    return {option: value for option, value in defaults.items() if option in names}
