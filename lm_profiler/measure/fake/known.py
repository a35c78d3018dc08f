"""Fake tensors that know their values where that is cheap: tensors made from numbers, and those of a batch.

Torch keeps the value of a fake tensor that is made from one number, and computes with it as long as all inputs of an
operator have values (the constants of ``FakeTensorMode``). Here small tensors keep theirs too. Whatever depends on
weights has no value.
"""

from __future__ import annotations

import builtins
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Number
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from lm_profiler.measure.fake.unknown import DependsOnValues, Unknown
from lm_profiler.torch_names import (
    ASKED_VALUE,
    FAKE_MODE,
    FAKE_TENSOR,
    NO_MODES,
    SCHEMA,
    SPARSE_INDICES,
    SPARSE_VALUES,
    tree_leaves,
    tree_map,
)

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor
else:
    FakeTensor = FAKE_TENSOR.as_base()

MOST = 1 << 18  # the most elements of a tensor whose value is kept

_COALESCES = {torch.ops.aten._coalesce.default}
_OVERLOAD = type(torch.ops.aten.add.Tensor)


class KnownValues(FAKE_MODE.as_base()):  # type: ignore[misc]  # a class that is looked up at run time
    """Keeps the values of small tensors, also random ones: a step may branch on what it draws, as any step of a run."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        sys.modules[FakeTensor.__module__].CONSTANT_NUMEL_LIMIT = MOST  # type: ignore[attr-defined]

    def known(self, value: Tensor) -> FakeTensor:
        """Return a fake tensor with this value, whose storage nobody else may write to."""
        known: FakeTensor = self.fake_tensor_converter.from_real_tensor(self, value, make_constant=True)
        return known

    def forget(self, value: Any) -> None:
        """Make the values of all tensors in ``value`` unknown, and of those that share their storage."""
        for leaf in tree_leaves(value):
            if isinstance(leaf, FakeTensor) and leaf.constant is not None:
                self.fake_tensor_converter.invalidate_constant_aliases(leaf.constant)
                leaf.constant = None

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return torch's fake result, with its value where that can be known."""
        kwargs = kwargs or {}
        kind = _kind(func)
        if kind.asks:  # two thirds of all calls, so they come first
            return super().dispatch(func, types, args, kwargs)
        if kind.sparsifies:
            raise DependsOnValues
        if _has_real((*args, *kwargs.values())):
            args, kwargs = tree_map(self._with_value, (args, kwargs))
        made = super().dispatch(func, types, args, kwargs)
        if isinstance(made, FakeTensor) and made.layout is torch.sparse_coo:
            with self:
                return _with_rows(func, made, args)
        if kind.constructs and isinstance(made, FakeTensor) and made.constant is None and _is_made_of_numbers(made):
            with NO_MODES.find()():
                real = func(*args, **kwargs)
            return self.known(real)
        if kind.empty:
            self.forget(made)
        elif kind.normalizes:
            self.forget((args, kwargs))
        elif kind.written_lists and not all(
            leaf.constant is not None for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)
        ):
            for at, name in kind.written_lists:  # torch forgets single tensors alone
                self.forget(args[at] if at < len(args) else kwargs.get(name))
        return made

    def _with_value(self, given: Any) -> Any:
        """Replace a small real tensor, such as data that a module keeps, by a fake one with its value."""
        plain = type(given) is Tensor and given.layout is torch.strided and not given.is_quantized
        if plain and given.device.type == "cpu" and given.numel() <= MOST and not given.requires_grad:
            return self.known(given)
        return given


@dataclass(frozen=True)
class _Kind:
    """How an operator affects values."""

    asks: bool = False  # it asks for a device or a size, and neither makes nor changes a value
    constructs: bool = False  # it makes a tensor from numbers alone
    empty: bool = False  # it makes a tensor without setting its values
    normalizes: bool = False  # it updates running statistics, which most schemas of batch norm do not declare
    sparsifies: bool = False  # it makes a sparse tensor, whose number of rows depends on values
    # the lists of tensors that it writes to: position among the arguments, and name
    written_lists: Sequence[tuple[int, str]] = ()


@cache
def _kind(func: Any) -> _Kind:
    if not isinstance(func, _OVERLOAD) or func.namespace == "prim":
        return _Kind(asks=True)
    empty, schema = "empty" in func.name(), SCHEMA.of(func)
    return _Kind(
        constructs=_makes_a_tensor(schema) and not empty,
        empty=empty,
        normalizes="batch_norm" in func.name(),
        sparsifies="to_sparse" in func.name(),
        written_lists=tuple(
            (at, argument.name)
            for at, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write and "List" in str(argument.type)
        ),
    )


def _makes_a_tensor(schema: Any) -> bool:
    """Return whether an operator takes no tensor and returns exactly one."""
    takes = any("Tensor" in str(argument.type) for argument in schema.arguments)
    return not takes and [str(made.type) for made in schema.returns] == ["Tensor"]


def _with_rows(func: Any, made: Tensor, given: Sequence[Any]) -> Tensor:
    """Return ``made`` with the rows of all its sparse inputs: torch gives a fake sparse result no rows.

    Rows that occur twice count twice: which ones do depends on values.
    """
    sparse = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and leaf.layout is torch.sparse_coo]
    sparse = [each for each in sparse if each is not made and SPARSE_VALUES.of(each)().shape[0]]
    if SPARSE_VALUES.of(made)().shape[0]:
        return made
    if func is torch.ops.aten._embedding_bag_backward.default:
        gradient, indices = given[:2]
        values = gradient.new_empty(indices.numel(), gradient.shape[-1])
        return torch.sparse_coo_tensor(indices.view(1, -1), values, made.shape, check_invariants=False)
    if not sparse:
        return made
    coalesced = func in _COALESCES or (len(sparse) == 1 and sparse[0].is_coalesced())
    rows = [
        torch.cat([part.of(each)() for each in sparse], dim) for part, dim in ((SPARSE_INDICES, 1), (SPARSE_VALUES, 0))
    ]
    return torch.sparse_coo_tensor(rows[0], rows[1].to(made.dtype), made.shape, is_coalesced=coalesced)


def _has_real(given: Sequence[Any]) -> bool:
    """Return whether a tensor among ``given``, or in a list among them, is not fake."""
    for each in given:
        kind = type(each)
        if kind is Tensor or (kind in (list, tuple) and _has_real(each)):
            return True
    return False


def _is_made_of_numbers(made: Tensor) -> bool:
    return made.device.type == "cpu" and made.numel() <= MOST and made.layout is torch.strided


def answer_with_unknown() -> None:
    """Have fake tensors without a value answer ``item`` with an ``Unknown``, and pass all checks of their values.

    They count as finite, and the checks of distributions and metrics hold. Only for a process of its own: this replaces
    code of torch and of Python.
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
    for name, answer in (("isnan", False), ("isinf", False), ("isfinite", True)):
        taken = _always_finite(answer, getattr(torch, name))
        setattr(torch, name, taken)
        setattr(FakeTensor, name, taken)
        setattr(math, name, _number_always_finite(answer, getattr(math, name)))


def _choosing_with_unknown(choose: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``choose`` (``max`` or ``min``): among numbers one of which is unknown, the result is unknown."""

    def chosen(*given: Any, **kwargs: Any) -> Any:
        try:
            return choose(*given, **kwargs)
        except DependsOnValues:
            among = given if len(given) > 1 else given[0]
            if isinstance(among, (list, tuple)) and all(isinstance(each, (Number, Unknown)) for each in among):
                return Unknown()
            raise

    return chosen


def _item(tensor: Tensor) -> Any:
    try:
        return Tensor.item(tensor)
    except ASKED_VALUE.find():
        return Unknown()


def _format(tensor: Tensor, how: str) -> str:
    return format(tensor.item(), how) if tensor.dim() == 0 else repr(tensor)


def _numpy(tensor: Tensor, *, force: bool = False) -> Any:
    if isinstance(tensor, FakeTensor) and tensor.constant is not None:
        return Tensor.numpy(tensor.constant, force=force)
    if tensor.numel() > MOST:
        raise DependsOnValues
    return np.full(tuple(tensor.shape), Unknown(), dtype=object)


def _making_from_unknown(make: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``make``, which makes a tensor from numbers: some of them may be unknown."""

    def made(data: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(data, Unknown) or (
            isinstance(data, (list, tuple)) and any(isinstance(leaf, Unknown) for leaf in tree_leaves(data))
        ):
            return Unknown.__torch_function__(make, (), (data, *args), kwargs)
        return make(data, *args, **kwargs)

    return made


def _always_finite(answer: bool, ask: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Replace ``ask`` (``isnan`` and the like): a run that is planned is taken to stay finite."""

    def taken(given: Any, /, *args: Any, **kwargs: Any) -> Tensor:
        unknown = isinstance(given, FakeTensor) and given.constant is None and not given.fake_mode.in_kernel_invocation
        if not unknown:  # also where torch itself asks, to infer a shape
            return ask(given, *args, **kwargs)
        with given.fake_mode:
            return torch.full(given.shape, answer, dtype=torch.bool, device=given.device)

    return taken


def _number_always_finite(answer: bool, ask: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda number, /: answer if isinstance(number, Unknown) else ask(number)
