"""Pickles a step for the process that rehearses it: its module, a batch and optimizer states, without their data."""

from __future__ import annotations

import inspect
import io
import pickle
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lm_profiler.callbacks.instruments.loop import Loop
from lm_profiler.callbacks.instruments.sent_operators import reduce_operator
from lm_profiler.lightning_names import COMPILED_STEPS
from lm_profiler.measure.copies.module_copies import ModuleCopy, UncopyableError
from lm_profiler.measure.counts import registered
from lm_profiler.measure.counts.recompiles import is_wrapped_by_compiler
from lm_profiler.measure.counts.uncountable import UncountableError
from lm_profiler.record.run_record import Verb
from lm_profiler.torch_names import tree_leaves, tree_map

_META = torch.device("meta")
_PLAIN_TYPES = (bool, int, float, str)
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
# the file of torch that defines the wrapper of a compiled function
_COMPILER_FILE = str(Path(torch.__file__).parent / "_dynamo" / "eval_frame.py")
# Tensors that code uses besides the module and the batch are pickled with their data up to this many elements.
_MOST_VALUES = 1 << 18


@dataclass(frozen=True)
class SentOptimizer:
    """The parameters and states of an optimizer."""

    groups: list[dict[str, Any]]  # the parameter groups, with their plain options
    states: list[list[Tensor]]  # for each parameter, its states on the device

    @classmethod
    def from_optimizer(
        cls, optimizer: Optimizer, device: torch.device
    ) -> SentOptimizer:
        """Return the parameters and states of ``optimizer``.

        Raises:
            UncountableError: it may compute the loss several times in a step.
        """
        if "max_eval" in optimizer.defaults:  # LBFGS
            raise UncountableError(
                f"{type(optimizer).__name__} may compute the loss several times in a step"
            )
        groups = []
        states = []
        for group in optimizer.param_groups:
            groups.append(_plain_options(group))
            for parameter in group["params"]:
                states_of_parameter = []
                for leaf in tree_leaves(optimizer.state.get(parameter, {})):
                    if isinstance(leaf, Tensor) and leaf.device == device:
                        states_of_parameter.append(leaf)
                states.append(states_of_parameter)
        return cls(groups, states)


def _plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a group and its plain options.

    Other options, such as a learning rate in a tensor, do not change the work of a step.
    """
    return {
        name: value
        for name, value in group.items()
        if name == "params" or isinstance(value, _PLAIN_TYPES)
    }


@dataclass(frozen=True)
class SentStep:
    """Everything that a step on one device depends on; its tensors have no data."""

    module: nn.Module  # a copy of the module: a LightningModule, or the model that a loop without a Trainer calls
    # the batch that the step receives; for a model the positional and the named arguments of its call
    batch: Any
    verb: Verb  # the verb whose step it is
    batches: int  # batches of one optimizer step on one rank
    precision: str  # Lightning's name of the precision
    on_cpu: bool  # whether the device is the CPU; on others, fused attention multiplies in the dtype of its inputs
    # the optimizers of the module; empty if they hold shards of its parameters
    optimizers: list[SentOptimizer]

    # the formulas that the program registered
    operator_formulas: dict[str, registered.Formula] = field(default_factory=dict)
    function_formulas: dict[type, registered.FunctionFormulas] = field(
        default_factory=dict
    )

    @classmethod
    def from_loop(cls, loop: Loop, verb: Verb, batch: Any) -> SentStep:
        """Return the step of ``verb`` that ``loop`` runs on ``batch``.

        Raises:
            UncountableError: it is unknown what one rank multiplies, or how often.
            UncopyableError: a part of the module has no shape, or belongs to one process alone.
        """
        module = loop.module
        while is_wrapped_by_compiler(module):
            module = next(module.children())
        device = loop.device
        if any(hasattr(parameter, "device_mesh") for parameter in module.parameters()):
            # It is unknown whether a rank multiplies whole weights or only its part of them.
            raise UncountableError("its weights are sharded")
        optimizers: list[SentOptimizer] = []
        if verb == "fit" and loop.holdings == "whole":
            # If a module has no optimizer, Lightning gives it one that has no parameters.
            used_optimizers = [
                optimizer for optimizer in loop.optimizers if optimizer.param_groups
            ]
            optimizers = [
                SentOptimizer.from_optimizer(optimizer, device)
                for optimizer in used_optimizers
            ]
        module, batch, optimizers = _copy_to_meta((module, batch, optimizers))
        _undo_lightnings_compilation(module)
        return cls(
            module=module,
            batch=batch,
            verb=verb,
            batches=loop.batches_per_step if verb == "fit" else 1,
            precision=loop.precision,
            on_cpu=device.type == "cpu",
            optimizers=optimizers,
            operator_formulas=dict(registered.operator_formulas),
            function_formulas=dict(registered.function_formulas),
        )

    def pickled(self) -> bytes:
        """Return the pickled step, for a process that cannot import what the program's own script defines.

        Classes and functions of the script, lambdas and closures are sent as code, and so are the globals that they
        use. The script itself does not run again.

        Raises:
            UncountableError: a part of the step, or of what its code uses, can only exist in this process.
        """
        with suppress(Exception):
            return self._dumped(has_stand_ins=False)
        # An object cannot be pickled, such as a lock, an open file or a connection. The step may not need it.
        try:
            return self._dumped(has_stand_ins=True)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise UncountableError(
                f"the step cannot be sent to another process: {reason}"
            ) from None

    def _dumped(self, has_stand_ins: bool) -> bytes:
        """Return the pickled step; with ``has_stand_ins``, an ``Absent`` stands for what cannot be pickled."""
        stream = io.BytesIO()
        pickler = _StepPickler(stream)
        pickler.has_stand_ins = has_stand_ins
        pickler.dump(self)
        return stream.getvalue()


class Absent:
    """Stands in for an object that can only exist in one process, such as a lock or an open file.

    It can be called and entered, and has every attribute. It has no truth value and no other special methods, so that
    no step takes another branch because of it.
    """

    def __getattr__(self, name: str) -> Absent:
        is_special_method = name.startswith("__")
        if is_special_method:
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Absent:
        return self

    def __enter__(self) -> Absent:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __bool__(self) -> bool:
        raise TypeError("the step uses an object that only one process can use")


class _StepPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles code by value if it cannot be imported, and compiled functions as they were before compilation.

    Devices that the code uses become the CPU, and large tensors lose their data.
    """

    has_stand_ins = False  # whether ``Absent`` replaces objects that cannot be pickled

    def reducer_override(self, value: Any) -> Any:
        """Return how ``value`` is pickled: large tensors without data, devices as the CPU, functions uncompiled.

        As pickle requires, the result is a function and its arguments, whose call returns the unpickled value.
        """
        if isinstance(value, FunctionType) and _is_compiled_wrapper(value):
            return _pickled_as(inspect.unwrap(value, stop=_is_plain_function))
        if isinstance(value, torch.device):
            return torch.device, ("cpu",)
        operator = reduce_operator(value)
        if operator is not None:
            return operator
        has_data = (
            type(value) is Tensor
            and value.device != _META
            and value.layout is torch.strided
        )
        if has_data and value.numel() > _MOST_VALUES:
            return _uninitialized, (tuple(value.shape), value.stride(), value.dtype)
        if has_data and value.device.type != "cpu":
            return _pickled_as(value.detach().cpu())
        # pickle has a function of its own for each type in its ``dispatch_table``
        is_known = type(value) in self.dispatch_table
        if self.has_stand_ins and not is_known and _cannot_be_pickled(value):
            return Absent, ()
        return super().reducer_override(value)


def _pickled_as(replacement: Any) -> Any:
    """Return the result of ``reducer_override`` that makes pickle write ``replacement`` in place of its value."""
    return _return_unchanged, (replacement,)


def _cannot_be_pickled(value: Any) -> bool:
    if isinstance(value, (type, FunctionType, ModuleType, Tensor, torch.nn.Module)):
        return False
    try:
        value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    except Exception:
        return True
    return False


def _uninitialized(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype)


def _is_compiled_wrapper(function: Any) -> bool:
    """Return whether ``function`` is the wrapper of a compiled function."""
    code = getattr(function, "__code__", None)
    return getattr(code, "co_filename", None) == _COMPILER_FILE


def _is_plain_function(function: Any) -> bool:
    """Return whether ``function`` is as the program wrote it, and not the wrapper of its compiled form."""
    return not _is_compiled_wrapper(function)


def _return_unchanged(value: Any) -> Any:
    return value


def _undo_lightnings_compilation(module: nn.Module) -> None:
    """Remove the compiled methods of a module that was given to ``fit`` as ``torch.compile(module)``.

    They are bound to the original module, whose weights have data.
    """
    if COMPILED_STEPS.get_or(module) is None:
        return
    vars(module)[COMPILED_STEPS.name] = None
    for name in ("forward", *_STEPS):
        vars(module).pop(name, None)


def without_data(batch: Any) -> Any:
    """Return ``batch`` with tensors that have shapes and no data; raise UncountableError if that is impossible."""
    return tree_map(_shape_of_leaf, batch)


def copy_to_host(batch: Any) -> Any:
    return tree_map(_leaf_on_host, batch)


def _leaf_on_host(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().to("cpu", copy=True)
    return leaf


def _copy_to_meta(value: Any) -> Any:
    copy = ModuleCopy(partial(shape_of, device=_META), _META)
    return copy(value)


def shape_of(tensor: Tensor, device: torch.device) -> Tensor:
    """Return an uninitialized tensor on ``device`` with the shape, the strides and the dtype of ``tensor``."""
    if torch.nn.parameter.is_lazy(tensor) or tensor.layout is not torch.strided:
        raise UncopyableError("a tensor has no shape yet, or is not dense")
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
    )


def _shape_of_leaf(leaf: Any) -> Any:
    """Return a leaf of the batch without its data: a tensor on the meta device, a plain value unchanged."""
    if leaf is None or isinstance(leaf, (*_PLAIN_TYPES, bytes)):
        return leaf
    if isinstance(leaf, Tensor):
        return leaf.to("meta")
    shape = _copy_to_meta(leaf)
    if shape is leaf:
        raise UncountableError(
            f"the batch contains a {type(leaf).__name__}, which cannot be copied without its data"
        )
    return shape
