"""Copies modules for steps that do not train them, and finds what a precision does to the numbers of a step.

The audit runs the step twice on copies of the module, once as it is trained and once in float32: the same weights and
batch, cast up exactly, in eval mode (two precisions draw different dropout masks from one seed), eagerly, with the same
seeds.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import random
import types
import warnings
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
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

_UNCOPYABLE = {"DistributedDataParallel", "FullyShardedDataParallel"}  # by name: importing them is slow
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class UncopyableError(Exception):
    pass


class ModuleCopy:
    """Copies modules, containers, tensors and random generators; everything else is shared with the original.

    Modules are copied as pickle does (``__getstate__``): metrics rewrap their methods, and a LightningModule drops its
    trainer. A deepcopy would copy data sets and loggers too, and fail at locks and files. What occurs twice is copied
    once, which keeps weights tied. The copy runs eagerly and without module hooks: FSDP2 gathers the real weights in
    hooks, and users' hooks store what they see. ``tensor`` copies the data of one tensor; ``device`` takes the place of
    every device that the module remembers.
    """

    def __init__(self, tensor: Callable[[Tensor], Tensor], device: torch.device | None = None) -> None:
        self._tensor = tensor
        self._device = device
        self._made: dict[int, tuple[Any, Any]] = {}  # keep the original alive so that its id() is not reused

    def __call__(self, value: Any) -> Any:
        """Return the copy of a module or a batch; raises UncopyableError for ScriptModules, DDP and FSDP."""
        if id(value) in self._made:
            return self._made[id(value)][1]
        if isinstance(value, Tensor):
            made = self._tensor(value).requires_grad_(value.requires_grad)
            is_parameter = isinstance(value, nn.Parameter)
            return self._keep(value, nn.Parameter(made, value.requires_grad) if is_parameter else made)
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, torch.device):
            return self._device or value
        if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
            return types.MethodType(value.__func__, self(value.__self__))
        return self._container(value)

    def _keep(self, original: Any, made: Any) -> Any:
        self._made[id(original)] = original, made
        return made

    def _module(self, module: nn.Module) -> nn.Module:
        if isinstance(module, torch.jit.ScriptModule) or type(module).__name__ in _UNCOPYABLE:
            raise UncopyableError(f"a {type(module).__name__} cannot be copied")
        clone: nn.Module = self._keep(module, object.__new__(type(module)))
        # A parametrized module refuses to be pickled.
        state = dict(vars(module)) if is_parametrized(module) else module.__getstate__()
        # Without its compiled call the copy runs eagerly.
        clone.__setstate__({key: self(value) for key, value in state.items() if key != COMPILED_CALL.name})
        # As a new module has them: empty, by whatever names this torch keeps them.
        vars(clone).update({name: none for name, none in vars(nn.Module()).items() if "_hooks" in name})
        return clone

    def _container(self, value: Any) -> Any:
        # Exact types only: a subclass may refuse writes. Kept before they are filled, since they may contain
        # themselves.
        if type(value) in (dict, OrderedDict, defaultdict) or isinstance(value, UserDict):
            made = self._keep(value, copy.copy(value))
            made.update((key, self(value[key])) for key in value)
        elif type(value) in (list, deque):
            made = self._keep(value, copy.copy(value))
            made.clear()
            made.extend(map(self, value))
        elif isinstance(value, tuple) and (type(value) is tuple or hasattr(value, "_make")):
            made = getattr(value, "_make", tuple)(map(self, value))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            made = self._keep(value, copy.copy(value))
            for each in dataclasses.fields(value):
                object.__setattr__(made, each.name, self(getattr(value, each.name)))  # frozen ones too
        elif type(value) in _GENERATORS:
            made = self._keep(value, copy.deepcopy(value))
        else:
            made = value
        return made


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Within this context steps of a copy of ``module`` run eagerly; random states and stdout stay as they are."""
    cuda = sorted({p.device.index for p in module.parameters() if p.device.type == "cuda"})
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.enter_context(torch.random.fork_rng(devices=cuda))
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


# (module, batch) to the loss, or to a mapping with the loss under ``"loss"``
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

    The module, its gradients, buffers and the random states stay as they are. On ``device`` it needs the memory of one
    more step of float32 weights and gradients; results are compared on the host. Module hooks do not run. ``step`` must
    reach the weights through its arguments; ``precision`` is the context of its forward pass, such as autocast. The
    loss is multiplied by ``loss_scale`` before backward, as a gradient scaler does.

    Raises:
        UncopyableError: The module cannot be copied.
        ValueError: ``step`` gives no loss that can be differentiated.
    """

    def copies(dtype: torch.dtype | None) -> tuple[nn.Module, Any]:
        def copied(tensor: Tensor) -> Tensor:
            to = dtype if tensor.is_floating_point() else None
            return tensor.detach().to(device=device, dtype=to, copy=True)

        return ModuleCopy(copied)(module), ModuleCopy(copied)(batch)

    with undisturbed(module), torch.enable_grad():
        as_it_is = _run(*copies(None), step, precision, loss_scale)
        reference = _run(*copies(torch.float32), step, exact_float32(), 1.0)
    return _compare(as_it_is, reference)


@dataclass
class _Seen:
    """The results of one run, as float32 on the host, by class of modules; shared parameters count once."""

    modules: Counter[str]
    loss: float = 0.0
    loss_dtype: str | None = None
    # the output of the ``last`` module that returned a floating-point tensor with dimensions
    output: dict[str, Tensor] = field(default_factory=dict)
    # the dtypes of a class's ``parameters``, ``outputs`` and ``gradients``
    dtypes: defaultdict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    gradients: defaultdict[str, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))


def _run(module: nn.Module, batch: Any, step: Step, precision: AbstractContextManager[Any], scale: float) -> _Seen:
    module.eval()
    seen = _Seen(Counter(map(_kind, module.modules())))
    hooks = [part.register_forward_hook(partial(_see_output, seen)) for part in module.modules()]
    seed()
    with precision:
        result = step(module, batch)
        loss = result.get("loss") if isinstance(result, Mapping) else result
    for hook in hooks:  # activation checkpointing would run them again
        hook.remove()
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        raise ValueError(f"expected a loss that can be differentiated, given {type(loss).__name__}")
    (loss * scale).backward()
    seen.loss, seen.loss_dtype = loss.item(), _name(loss.dtype)
    seen.output = {name: _on_host(output) for name, output in seen.output.items()}
    _see_gradients(seen, module, scale)
    return seen


def _see_output(seen: _Seen, part: nn.Module, arguments: Any, output: Any) -> None:
    floating = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    seen.dtypes[_kind(part), "outputs"].update(_name(leaf.dtype) for leaf in floating)
    seen.output = next(({"last": leaf} for leaf in floating if leaf.ndim), seen.output)


def _see_gradients(seen: _Seen, module: nn.Module, scale: float) -> None:
    for name, parameter in module.named_parameters():
        kind = _kind(module.get_submodule(name.rpartition(".")[0]))
        seen.dtypes[kind, "parameters"].add(_name(parameter.dtype))
        if parameter.grad is not None:
            seen.dtypes[kind, "gradients"].add(_name(parameter.grad.dtype))
            seen.gradients[kind][name] = _on_host(parameter.grad) / scale


def _kind(module: nn.Module) -> str:
    return type(module).__name__


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32).to_dense()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compare(seen: _Seen, reference: _Seen) -> NumericsFacts:
    gradients = {kind: _squares(seen.gradients[kind], reference.gradients[kind]) for kind in seen.modules}
    kinds = [
        NumericsKind(
            kind=kind,
            modules=modules,
            parameters=sorted(seen.dtypes[kind, "parameters"]),
            outputs=sorted(seen.dtypes[kind, "outputs"]),
            gradients=sorted(seen.dtypes[kind, "gradients"]),
            gradient_error=_relative([gradients[kind]]),
        )
        for kind, modules in seen.modules.items()
    ]
    return NumericsFacts(
        loss=_finite(seen.loss),
        loss_dtype=seen.loss_dtype,
        reference_loss=_finite(reference.loss),
        output_error=_relative([_squares(seen.output, reference.output)]),
        gradient_error=_relative(gradients.values()),
        kinds=[kind for kind in kinds if kind.parameters or kind.outputs],
    )


def _squares(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> tuple[float, float]:
    norm = partial(torch.linalg.vector_norm, dtype=torch.float64)
    pairs = [(ours[name], reference[name]) for name in ours.keys() & reference.keys()]
    return sum(norm(a - b).item() ** 2 for a, b in pairs), sum(norm(b).item() ** 2 for _, b in pairs)


def _relative(squares: Iterable[tuple[float, float]]) -> float | None:
    """Return the Euclidean norm of the differences over that of the references; None without references."""
    difference, reference = (sqrt(sum(column)) for column in zip(*squares, strict=True))
    return _finite(difference / reference) if reference else None


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None
