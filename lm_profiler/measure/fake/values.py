"""Keeps the values of fake tensors if that is cheap; the other values are unknown numbers.

torch keeps the value of a fake tensor that is made from one number, and computes with it as long as all inputs of an
operator have values (the constants of ``FakeTensorMode``). Here small tensors and batches keep their values too.
Whatever depends on weights has no value: ``item()`` of such a tensor returns an ``Unknown``.
"""

from __future__ import annotations

import builtins
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from numbers import Number
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from lm_profiler.measure.user_code import OURS, TORCH, package_of
from lm_profiler.torch_names import FAKES, NO_MODES, tree_leaves, tree_map

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor
else:
    FakeTensor = FAKES.as_base("FakeTensor")

MOST_ELEMENTS = 1 << 18  # the most elements of a tensor whose value is kept

# The lines that called ``float`` on an unknown number, which then had to return 1.0. The keys are in the order of the
# calls; the values are not used.
LINES_GIVEN_A_FAKE_FLOAT: dict[str, None] = {}

_OVERLOAD = type(torch.ops.aten.add.Tensor)


class DependsOnValues(Exception):
    """Raised if a step needs a value that cannot be known without running it."""


class Unknown:
    """An unknown number or truth value.

    It can be kept, added, averaged, logged and printed. A branch on it, or a size made from it, raises
    ``DependsOnValues``.
    """

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __format__(self, format_spec: str) -> str:
        return "unknown"

    def __repr__(self) -> str:
        return "unknown"

    def _return_self(self, *_: Any) -> Unknown:
        return self

    __neg__ = __pos__ = __abs__ = __round__ = __invert__ = item = _return_self

    def _refuse(self) -> Any:
        raise DependsOnValues

    def __float__(self) -> float:
        """Return 1.0, because Python accepts only a float here, and note the program's line that needed the value."""
        frame = sys._getframe(1)
        while frame.f_back is not None:
            is_of_program = package_of(frame.f_code.co_filename) not in (TORCH, OURS)
            if is_of_program:
                break
            frame = frame.f_back
        file_name = os.path.basename(frame.f_code.co_filename)  # noqa: PTH119
        LINES_GIVEN_A_FAKE_FLOAT[f"{file_name}, line {frame.f_lineno}"] = None
        return 1.0

    __bool__ = __int__ = __index__ = __complex__ = _refuse
    __trunc__ = __floor__ = __ceil__ = _refuse

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run ``func`` with 1.0 in place of unknowns, and forget the value of the result, which has the right size."""
        args, kwargs = tree_map(_one_if_unknown, (args, kwargs or {}))
        try:
            result = func(*args, **kwargs)
        except TypeError:
            # ``func`` takes integers, so the unknown number is a size.
            raise DependsOnValues from None
        for leaf in tree_leaves(result):
            mode = getattr(leaf, "fake_mode", None)
            if mode is not None:
                mode.forget(leaf)
        return result


def _one_if_unknown(leaf: Any) -> Any:
    return 1.0 if isinstance(leaf, Unknown) else leaf


def _operator(self: Unknown, operand: Any, *_: Any) -> Any:
    """Return an unknown for any binary operator."""
    return self if isinstance(operand, (Number, Unknown)) else NotImplemented


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "divmod"):
    setattr(Unknown, f"__{_name}__", _operator)
    setattr(Unknown, f"__r{_name}__", _operator)
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Unknown, f"__{_name}__", _operator)


class KnownValues(FAKES.as_base("FakeTensorMode")):  # type: ignore[misc]  # a class that is looked up at run time
    """Keeps the values of small tensors, even of random ones, because a step may branch on its random numbers."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        FAKES.find().CONSTANT_NUMEL_LIMIT = MOST_ELEMENTS

    def with_value(self, tensor: Tensor) -> FakeTensor:
        """Return a fake tensor that has the value of a real one."""
        fake: FakeTensor = self.fake_tensor_converter.from_real_tensor(
            self, tensor, make_constant=True
        )
        return fake

    def forget(self, value: Any) -> None:
        """Make the values unknown of all tensors in ``value``, and of tensors that share their storage."""
        for leaf in tree_leaves(value):
            if isinstance(leaf, FakeTensor) and leaf.constant is not None:
                self.fake_tensor_converter.invalidate_constant_aliases(leaf.constant)
                leaf.constant = None

    def dispatch(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call an operator on fake tensors.

        A result that is made from numbers only gets its value: so a step can read a number that depends on no data,
        such as a learning rate. A tensor that the operator writes loses its value.

        Raises:
            DependsOnValues: the shape of the result depends on data.
        """
        kwargs = kwargs or {}
        # Queries, for example of a device or a size, are two thirds of all calls, so they are handled first.
        if not isinstance(func, _OVERLOAD) or func.namespace == "prim":
            return super().dispatch(func, types, args, kwargs)
        tensors = list(_tensors((*args, *kwargs.values())))
        has_real_tensors = any(type(tensor) is Tensor for tensor in tensors)
        if has_real_tensors:
            args, kwargs = tree_map(self._fake_if_small, (args, kwargs))
        result = super().dispatch(func, types, args, kwargs)
        name = func.__name__
        if isinstance(result, FakeTensor):
            if result.layout is torch.sparse_coo:
                # The number of rows that it stores is unknown.
                raise DependsOnValues
            is_made_of_numbers = not tensors
            has_no_value = result.constant is None
            if "empty" in name:  # what its memory happens to contain is no value
                self.forget(result)
            elif is_made_of_numbers and has_no_value and _can_have_value(result):
                with NO_MODES.find()():
                    return self.with_value(func(*args, **kwargs))
        self._forget_written(name, args, kwargs)
        return result

    def _forget_written(self, name: str, args: Any, kwargs: Any) -> None:
        """Forget the values that the operator ``name`` has overwritten, if torch does not do so."""
        if "batch_norm" in name:
            # It updates running statistics, which most of its schemas do not declare.
            self.forget((args, kwargs))
            return
        works_in_place = name.partition(".")[0].endswith("_")
        takes_list = bool(args) and isinstance(args[0], (list, tuple))
        if not takes_list or not works_in_place:
            return
        # It writes to lists of tensors, of which torch handles only single ones. If any input is unknown, what it
        # writes is unknown.
        written = args[:1] if "foreach" in name else args
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, FakeTensor) and leaf.constant is None:
                self.forget(written)
                return

    def _fake_if_small(self, argument: Any) -> Any:
        """Replace a small real tensor, such as data that a module keeps, by a fake one with its value."""
        is_plain = (
            type(argument) is Tensor
            and not argument.is_quantized
            and not argument.requires_grad
        )
        if is_plain and _can_have_value(argument):
            return self.with_value(argument)
        return argument


def _tensors(arguments: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the tensors among ``arguments`` and in lists among them."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)


def _can_have_value(tensor: Tensor) -> bool:
    """Return whether the value of ``tensor`` is kept if it is known."""
    return (
        tensor.device.type == "cpu"
        and tensor.numel() <= MOST_ELEMENTS
        and tensor.layout is torch.strided
    )


def answer_with_unknown() -> None:
    """Make ``item`` of fake tensors without a value return an ``Unknown``, and all checks of their values pass.

    They count as finite, and the checks of distributions and metrics pass. This replaces code of torch and of Python,
    so it is only for a separate process.
    """
    Distribution.set_default_validate_args(False)
    FakeTensor.item = _item  # type: ignore[assignment,method-assign]
    FakeTensor.numpy = _numpy  # type: ignore[assignment,method-assign]
    FakeTensor.__format__ = _format  # type: ignore[method-assign]
    FakeTensor.__float__ = lambda tensor: float(tensor.item())  # type: ignore[method-assign]
    for choose in (max, min):
        setattr(builtins, choose.__name__, _choosing_with_unknown(choose))
    for name in ("tensor", "as_tensor"):
        setattr(torch, name, _making_from_unknown(getattr(torch, name)))
    answers_if_finite = {"isnan": False, "isinf": False, "isfinite": True}
    for name, answer in answers_if_finite.items():
        check = _always_finite(answer, getattr(torch, name))
        setattr(torch, name, check)
        setattr(FakeTensor, name, check)
        setattr(math, name, _always_finite(answer, getattr(math, name)))


def _item(tensor: Tensor) -> Any:
    """Replace ``Tensor.item``: return an unknown number for a fake tensor without a value."""
    try:
        return Tensor.item(tensor)
    except FAKES.find().DataDependentOutputException:
        return Unknown()


def _format(tensor: Tensor, format_spec: str) -> str:
    """Replace ``Tensor.__format__``, so that an unknown number can be printed."""
    if tensor.dim() == 0:
        return format(tensor.item(), format_spec)
    return repr(tensor)


def _numpy(tensor: Tensor, *, force: bool = False) -> Any:
    """Replace ``Tensor.numpy``: return an array of unknown numbers for a small fake tensor without a value."""
    if isinstance(tensor, FakeTensor) and tensor.constant is not None:
        return Tensor.numpy(tensor.constant, force=force)
    if tensor.numel() > MOST_ELEMENTS:
        raise DependsOnValues
    return np.full(tuple(tensor.shape), Unknown(), dtype=object)


def _choosing_with_unknown(choose: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of ``choose`` (``max`` or ``min``): if one of the numbers is unknown, so is the result."""

    def choose_or_unknown(*args: Any, **kwargs: Any) -> Any:
        """Call ``choose``; if it has to compare an unknown number with another one, return an unknown number."""
        try:
            return choose(*args, **kwargs)
        except DependsOnValues:
            values = args if len(args) > 1 else args[0]
            if not isinstance(values, (list, tuple)):
                raise
            if not all(isinstance(value, (Number, Unknown)) for value in values):
                raise
            return Unknown()

    return choose_or_unknown


def _making_from_unknown(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of ``make`` (which makes a tensor from numbers) that accepts unknown numbers."""

    def make_or_forget(data: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``make``; if one of the numbers in ``data`` is unknown, the values of the tensor are unknown."""
        numbers = [data]
        if isinstance(data, (list, tuple)):
            numbers = tree_leaves(data)
        has_unknown = any(isinstance(number, Unknown) for number in numbers)
        if has_unknown:
            # torch itself calls this method only for functions that take tensors
            all_args = (data, *args)
            return Unknown.__torch_function__(make, (), all_args, kwargs)
        return make(data, *args, **kwargs)

    return make_or_forget


def _always_finite(answer: bool, check: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of ``check`` (``isnan`` and the like) that returns ``answer`` for unknown values.

    A planned run is assumed to have only finite values.
    """

    def check_or_assume(value: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Return ``answer`` for an unknown number, a tensor of it for a tensor without values, else check."""
        if isinstance(value, Unknown):
            return answer
        is_unknown = isinstance(value, FakeTensor) and value.constant is None
        if not is_unknown:
            return check(value, *args, **kwargs)
        infers_shape = value.fake_mode.in_kernel_invocation
        if infers_shape:
            return check(value, *args, **kwargs)
        with value.fake_mode:
            return torch.full(
                value.shape, answer, dtype=torch.bool, device=value.device
            )

    return check_or_assume
