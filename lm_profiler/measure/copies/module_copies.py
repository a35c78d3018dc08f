"""Copies modules for steps that do not train them, and measures the error that a precision causes in a step.

The audit runs a step twice on copies of the module: once in the precision of training and once in float32, with the
same weights and batch, cast up exactly, and the same seeds. It runs eagerly, and in eval mode, because two precisions
draw different dropout masks from one seed.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import random
import types
import warnings
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    redirect_stdout,
)
from dataclasses import dataclass, field
from functools import partial
from math import isfinite, sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lm_profiler.measure.device.environment import exact_float32
from lm_profiler.record.run_record import NumericsFacts, NumericsKind
from lm_profiler.torch_names import COMPILED_CALL, tree_leaves

# classes of modules, by name because importing them is slow
_UNCOPYABLE = {"DistributedDataParallel", "FullyShardedDataParallel"}
_GENERATORS = (
    torch.Generator,
    np.random.Generator,
    np.random.RandomState,
    random.Random,
)


class UncopyableError(Exception):
    pass


class ModuleCopy:
    """Copies modules, containers, tensors and random generators; everything else is shared with the original.

    Modules are copied as pickle does (``__getstate__``): metrics rewrap their methods, and a LightningModule drops its
    trainer. A deepcopy would copy data sets and loggers too, and fail at locks and files. An object that occurs twice
    is copied once, which keeps weights tied. The copy runs eagerly and without module hooks: FSDP2 gathers the real
    weights in hooks, and users' hooks may store what they receive.

    Args:
        tensor: copies the data of one tensor.
        device: replaces every device that the module remembers; None keeps them.
    """

    def __init__(
        self, tensor: Callable[[Tensor], Tensor], device: torch.device | None = None
    ) -> None:
        self._tensor = tensor
        self._device = device
        # the identity of an original to the original, kept alive so that its identity is not reused, and its copy
        self._copies: dict[int, tuple[Any, Any]] = {}

    def __call__(self, value: Any) -> Any:
        """Return the copy of a module or a batch.

        Raises:
            UncopyableError: it contains a ScriptModule, or a module wrapped by DDP or FSDP.
        """
        if id(value) in self._copies:
            _, known_copy = self._copies[id(value)]
            return known_copy
        if isinstance(value, Tensor):
            tensor_copy = self._tensor(value).requires_grad_(value.requires_grad)
            if isinstance(value, nn.Parameter):
                tensor_copy = nn.Parameter(tensor_copy, value.requires_grad)
            return self._remember(value, tensor_copy)
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, torch.device):
            return self._device or value
        is_method = isinstance(value, types.MethodType)
        if is_method and isinstance(value.__self__, nn.Module):
            return types.MethodType(value.__func__, self(value.__self__))
        return self._container(value)

    def _remember(self, original: Any, copied: Any) -> Any:
        """Return ``copied``, and use it for every further occurrence of ``original``."""
        self._copies[id(original)] = (original, copied)
        return copied

    def _module(self, module: nn.Module) -> nn.Module:
        """Return a copy of ``module`` without its hooks and without its compiled call."""
        class_name = type(module).__name__
        is_script = isinstance(module, torch.jit.ScriptModule)
        if is_script or class_name in _UNCOPYABLE:
            raise UncopyableError(f"a {class_name} cannot be copied")
        clone: nn.Module = self._remember(module, object.__new__(type(module)))
        # A parametrized module refuses to be pickled.
        state = dict(vars(module)) if is_parametrized(module) else module.__getstate__()
        # Without its compiled call the copy runs eagerly.
        state_copy = {
            key: self(value)
            for key, value in state.items()
            if key != COMPILED_CALL.name
        }
        clone.__setstate__(state_copy)
        # The dicts of hooks are those of a new module, which are empty; their names depend on the version of torch.
        for name, empty_hooks in vars(nn.Module()).items():
            if "_hooks" in name:
                vars(clone)[name] = empty_hooks
        return clone

    def _container(self, value: Any) -> Any:
        """Return a copy of a container with copies of what it contains; anything else is returned as it is."""
        # Only exact types, because a subclass may refuse writes. Copies are remembered before they are filled,
        # because a container may contain itself.
        is_mapping = type(value) in (dict, OrderedDict, defaultdict)
        is_named_tuple = isinstance(value, tuple) and hasattr(value, "_make")
        is_class = isinstance(value, type)
        is_dataclass_instance = dataclasses.is_dataclass(value) and not is_class
        if is_mapping or isinstance(value, UserDict):
            container = self._remember(value, copy.copy(value))
            for key in value:
                container[key] = self(value[key])
            return container
        if type(value) in (list, deque):
            container = self._remember(value, copy.copy(value))
            container.clear()
            container.extend(map(self, value))
            return container
        if type(value) is tuple:
            return tuple(map(self, value))
        if is_named_tuple:
            return value._make(map(self, value))
        if is_dataclass_instance:
            container = self._remember(value, copy.copy(value))
            for field_of_class in dataclasses.fields(value):
                field_copy = self(getattr(value, field_of_class.name))
                # also works for frozen dataclasses
                object.__setattr__(container, field_of_class.name, field_copy)
            return container
        if type(value) in _GENERATORS:
            return self._remember(value, copy.deepcopy(value))
        return value


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Within this context, steps of a copy of ``module`` run eagerly and change neither random states nor stdout."""
    cuda_devices = set()
    for parameter in module.parameters():
        if parameter.device.type == "cuda":
            cuda_devices.add(parameter.device.index)
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.enter_context(torch.random.fork_rng(devices=sorted(cuda_devices)))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(redirect_stdout(io.StringIO()))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def seed() -> None:
    """Seed all of the process's random generators, so that two steps draw the same numbers."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


# takes a module and a batch; returns the loss, or a mapping with the loss under ``"loss"``
Step = Callable[[nn.Module, Any], Tensor | Mapping[str, Any] | None]


def audit(
    module: nn.Module,
    step: Step,
    batch: Any,
    device: torch.device,
    precision: AbstractContextManager[Any],
    loss_scale: float = 1.0,
) -> NumericsFacts:
    """Run ``step(copy, batch)`` and the backward pass of its loss, in this precision and in float32, and compare.

    The module, its gradients and buffers, and the random states do not change. Module hooks do not run.

    Args:
        module: the module that trains.
        step: must reach the weights through its arguments.
        batch: the batch of the step.
        device: where the steps run; it needs memory for float32 weights and gradients of one more step. Results are
            compared on the host.
        precision: the context of the forward pass, such as autocast.
        loss_scale: the factor of the loss before backward, as of a gradient scaler.

    Raises:
        UncopyableError: the module cannot be copied.
        ValueError: ``step`` returns no loss that can be differentiated.
    """

    def copy_of(original: Any, float_dtype: torch.dtype | None) -> Any:
        """Return a copy on ``device`` whose floating-point tensors have ``float_dtype``; None keeps their dtype."""

        def copy_tensor(tensor: Tensor) -> Tensor:
            dtype = float_dtype if tensor.is_floating_point() else None
            return tensor.detach().to(device=device, dtype=dtype, copy=True)

        return ModuleCopy(copy_tensor)(original)

    with undisturbed(module), torch.enable_grad():
        module_copy = copy_of(module, float_dtype=None)
        batch_copy = copy_of(batch, float_dtype=None)
        as_trained = _run_step(module_copy, batch_copy, step, precision, loss_scale)
        # free before the next copies are made
        del module_copy, batch_copy
        module32 = copy_of(module, torch.float32)
        batch32 = copy_of(batch, torch.float32)
        reference = _run_step(module32, batch32, step, exact_float32(), scale=1.0)
    return _compare(as_trained, reference)


@dataclass
class _StepResults:
    """The results of one run, as float32 on the host. A kind is a class of modules, by name."""

    modules: Counter[str]  # the number of modules of each kind
    loss: float = 0.0
    loss_dtype: str | None = None
    # the floating-point tensor with dimensions that a module returned last
    last_output: Tensor | None = None
    # by kind and ``parameters``, ``outputs`` or ``gradients``
    dtypes: defaultdict[tuple[str, str], set[str]] = field(
        default_factory=lambda: defaultdict(set)
    )
    # by kind, and then by the name of the parameter; shared parameters occur once
    gradients: defaultdict[str, dict[str, Tensor]] = field(
        default_factory=lambda: defaultdict(dict)
    )


def _run_step(
    module: nn.Module,
    batch: Any,
    step: Step,
    precision: AbstractContextManager[Any],
    scale: float,
) -> _StepResults:
    """Run a step of ``module`` in a precision, with its backward pass.

    The loss is multiplied by ``scale`` before backward, and the gradients are divided by it.
    """
    module.eval()
    results = _StepResults(Counter(map(_kind, module.modules())))
    hooks = [
        part.register_forward_hook(partial(_note_output, results))
        for part in module.modules()
    ]
    seed()
    with precision:
        result = step(module, batch)
        loss = result.get("loss") if isinstance(result, Mapping) else result
    # Removed before backward, because activation checkpointing would call them again there.
    for hook in hooks:
        hook.remove()
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        raise ValueError(
            f"expected a loss that can be differentiated, given {type(loss).__name__}"
        )
    (loss * scale).backward()
    results.loss = loss.item()
    results.loss_dtype = _dtype_name(loss.dtype)
    if results.last_output is not None:
        results.last_output = _on_host(results.last_output)
    _note_gradients(results, module, scale)
    return results


def _note_output(
    results: _StepResults, part: nn.Module, arguments: Any, output: Any
) -> None:
    """Note the dtypes of the tensors that a module returns, and the first of them as the last output.

    Hooks of outer modules run last, so in the end the last output is that of the model.
    """
    floating = [
        leaf
        for leaf in tree_leaves(output)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    for leaf in floating:
        results.dtypes[_kind(part), "outputs"].add(_dtype_name(leaf.dtype))
    with_dimensions = [leaf for leaf in floating if leaf.ndim > 0]
    if with_dimensions:
        results.last_output = with_dimensions[0]


def _note_gradients(results: _StepResults, module: nn.Module, scale: float) -> None:
    """Note the gradients, divided by ``scale``, and the dtypes of parameters and gradients, by kind of module."""
    for name, parameter in module.named_parameters():
        owner_path = name.rpartition(".")[0]
        kind = _kind(module.get_submodule(owner_path))
        parameter_dtypes = results.dtypes[kind, "parameters"]
        parameter_dtypes.add(_dtype_name(parameter.dtype))
        gradient = parameter.grad
        if gradient is None:
            continue
        gradient_dtypes = results.dtypes[kind, "gradients"]
        gradient_dtypes.add(_dtype_name(gradient.dtype))
        results.gradients[kind][name] = _on_host(gradient) / scale


def _kind(module: nn.Module) -> str:
    return type(module).__name__


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32).to_dense()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass
class _SquaredNorms:
    """The squared Euclidean norms of the differences of some tensors, and of their references."""

    difference: float = 0.0
    reference: float = 0.0

    def add(self, other: _SquaredNorms) -> None:
        self.difference += other.difference
        self.reference += other.reference

    @property
    def relative_error(self) -> float | None:
        """The norm of the differences divided by that of the references; None if that is not a finite number."""
        if self.reference == 0.0:
            return None
        return _finite(sqrt(self.difference) / sqrt(self.reference))


def _compare(results: _StepResults, reference: _StepResults) -> NumericsFacts:
    """Return the errors of loss, output and gradients relative to the ``reference`` in float32; also by kind."""
    all_gradients = _SquaredNorms()
    kinds = []
    for kind, modules in results.modules.items():
        gradients = _squared_norms(results.gradients[kind], reference.gradients[kind])
        all_gradients.add(gradients)
        parameter_dtypes = results.dtypes[kind, "parameters"]
        output_dtypes = results.dtypes[kind, "outputs"]
        if not parameter_dtypes and not output_dtypes:
            continue
        kinds.append(
            NumericsKind(
                kind=kind,
                modules=modules,
                parameters=sorted(parameter_dtypes),
                outputs=sorted(output_dtypes),
                gradients=sorted(results.dtypes[kind, "gradients"]),
                gradient_error=gradients.relative_error,
            )
        )
    return NumericsFacts(
        loss=_finite(results.loss),
        loss_dtype=results.loss_dtype,
        reference_loss=_finite(reference.loss),
        output_error=_output_error(results.last_output, reference.last_output),
        gradient_error=all_gradients.relative_error,
        kinds=kinds,
    )


def _output_error(output: Tensor | None, reference: Tensor | None) -> float | None:
    """Return the relative error of the output; None if one of the two is missing."""
    if output is None or reference is None:
        return None
    return _squared_norms({"output": output}, {"output": reference}).relative_error


def _squared_norms(
    tensors: Mapping[str, Tensor], references: Mapping[str, Tensor]
) -> _SquaredNorms:
    """Sum the squared norms of the references and of the differences, over the names in both mappings."""
    sums = _SquaredNorms()
    for name, tensor in tensors.items():
        if name in references:
            sums.difference += _squared_norm(tensor - references[name])
            sums.reference += _squared_norm(references[name])
    return sums


def _squared_norm(tensor: Tensor) -> float:
    norm = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return float(norm.item()) ** 2


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None
