"""Keeps the formulas that a program registers, for FLOPs of operators and autograd Functions that torch does not know.

This module does not import torch, so that ``lm_profiler.register_flops`` costs nothing if nothing is profiled.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lm_profiler.measure.boundary import comes_from_outside, error_text
from lm_profiler.measure.counts.uncountable import BrokenFormulaError
from lm_profiler.usage_error import UsageError

Formula = Callable[..., int]  # takes the arguments of a call, and returns its FLOPs

_OPERATOR_NAME = re.compile(r"\w+::\w+")
_SUBJECT = "register_flops"


@dataclass(frozen=True)
class FunctionFormulas:
    """The formulas of an autograd Function."""

    forward: Formula
    # None: either ``backward_per_forward`` counts, or else the operators that backward calls
    backward: Formula | None
    # FLOPs of backward as a multiple of those of the same call's forward; 0 without such a rule
    backward_per_forward: int = 0
    # of attention: counts the forward as if no pair were masked
    unmasked: Formula | None = None


@dataclass(frozen=True)
class ProgramFormula:
    """A formula that the program registered.

    Raises:
        BrokenFormulaError: the formula raises, or does not return a number.
    """

    name: str  # the operator or method that it counts
    formula: Formula

    def __call__(self, *args: Any, **kwargs: Any) -> int:
        """Return what the formula returns; raise BrokenFormulaError if it raises, or returns no number."""
        try:
            flops = self.formula(*args, **kwargs)
        except Exception as error:
            if comes_from_outside(error):
                raise
            raise BrokenFormulaError(
                f"the formula of {self.name} raises {error_text(error)}"
            ) from None
        try:
            return int(flops)
        except (TypeError, ValueError):
            raise BrokenFormulaError(
                f"the formula of {self.name} has to return a number, and returns {flops!r}"
            ) from None


# by the operator's name, such as ``my::kernel``
operator_formulas: dict[str, Formula] = {}
function_formulas: dict[type, FunctionFormulas] = {}  # by the autograd Function


def register_flops(
    target: str | type, formula: Formula, backward: Formula | None = None
) -> None:
    """Count the FLOPs of ``target`` by ``formula``, in this process from now on.

    Args:
        target: An operator by its name, such as ``"my::kernel"``, or a class derived from ``torch.autograd.Function``.
        formula: Takes the arguments of the call (of a Function without its context) and returns FLOPs. It should
            read shapes only.
        backward: The same for the Function's ``backward``, context included. Without it, the operators that
            ``backward`` calls are counted. The backward operator of an operator is a target of its own.

    Raises:
        UsageError: the target is neither, a formula is no function, or ``backward`` is given for an operator.
    """
    _expect_callable(formula, "formula")
    if backward is not None:
        _expect_callable(backward, "backward")
    if isinstance(target, str):
        if not _OPERATOR_NAME.fullmatch(target):
            raise UsageError(
                f"{_SUBJECT}: expected an operator's name such as my::kernel, given {target!r}"
            )
        if backward is not None:
            raise UsageError(
                f"{_SUBJECT}: {target} is an operator, for which `backward` has no meaning; register its backward "
                "operator by name"
            )
        operator_formulas[target] = ProgramFormula(target, formula)
    elif _is_autograd_function(target):
        checked_backward = None
        if backward is not None:
            checked_backward = ProgramFormula(f"{target.__name__}.backward", backward)
        function_formulas[target] = FunctionFormulas(
            ProgramFormula(f"{target.__name__}.forward", formula), checked_backward
        )
    else:
        raise UsageError(
            f"{_SUBJECT}: expected an operator's name or a class derived from torch.autograd.Function, given {target!r}"
        )


def _expect_callable(formula: object, name: str) -> None:
    """Raise UsageError if ``formula``, which the user gave as the argument ``name``, is not a function."""
    if not callable(formula):
        raise UsageError(
            f"{_SUBJECT}: expected a function for {name}, given {formula!r}"
        )


def _is_autograd_function(target: object) -> bool:
    """Return whether ``target`` is a class derived from ``torch.autograd.Function``."""
    if not isinstance(target, type):
        return False
    return any(
        base.__module__ == "torch.autograd.function" and base.__name__ == "Function"
        for base in target.__mro__
    )


def has_context(function: Any) -> bool:
    """Return whether ``forward`` of an autograd Function takes the context first.

    It does not if the class has a ``setup_context`` of its own.
    """
    for kind in function.__mro__:
        if "setup_context" in vars(kind):
            return bool(kind.__module__ == "torch.autograd.function")
    return True


def has_program_formulas() -> bool:
    """Return whether the program registered any formula."""
    formulas = list(operator_formulas.values())
    for formulas_of_function in function_formulas.values():
        formulas.append(formulas_of_function.forward)
    return any(isinstance(formula, ProgramFormula) for formula in formulas)
