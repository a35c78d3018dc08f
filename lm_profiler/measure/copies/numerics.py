"""What a precision does to a step: the dtypes that it really has, and how far its results are from float32's.

The step runs twice on copies of the module, once as it is trained and once in float32: the same weights and batch, cast
up exactly, in eval mode (two precisions draw unlike dropout masks from one seed), eagerly, with the same seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import isfinite, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lm_profiler.measure.copies.compiled_flops import Step, loss_of
from lm_profiler.measure.copies.module_copy import ModuleCopy, seed, undisturbed
from lm_profiler.measure.device.precision import Switches, operators_with_precision
from lm_profiler.record.run import NumericsFacts, NumericsKind


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
    more step of float32 weights and gradients; results are compared on the host. Module hooks do not run.

    Args:
        module: As it is trained, its weights in the dtypes that the precision gave them.
        step: For example ``lambda m, b: m.training_step(b, 0)``. It must reach the weights through its arguments.
        batch: Tensors within dicts, lists, tuples and dataclasses, on any device.
        device: Where to run.
        precision: The context of the forward pass, such as autocast.
        loss_scale: The loss is multiplied by it before backward, as a gradient scaler does; gradients are divided.

    Raises:
        UncopyableError: The module cannot be copied.
        ValueError: ``step`` gives no loss that can be differentiated.
        Exception: Whatever else it raises.
    """
    with undisturbed(module), torch.enable_grad():
        as_it_is = _run(_copy(module, None, device), step, _copy(batch, None, device), precision, loss_scale)
        reference = _run(_copy(module, torch.float32, device), step, _copy(batch, torch.float32, device), _exact(), 1.0)
    return _compare(as_it_is, reference)


def _copy(value: Any, dtype: torch.dtype | None, device: torch.device) -> Any:
    return ModuleCopy(partial(_copy_tensor, dtype=dtype, device=device))(value)


def _copy_tensor(tensor: Tensor, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    to = dtype if tensor.is_floating_point() else None
    return tensor.detach().to(device=device, dtype=to, copy=True)


@contextmanager
def _exact() -> Iterator[None]:
    """float32 as it is: neither TF32 nor bf16 within its products and convolutions."""
    before = Switches.now()
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    for operator in operators_with_precision():
        operator.fp32_precision = "ieee"
    try:
        yield
    finally:
        before.restore()


@dataclass
class _Seen:
    """One run, its results as float32 on the host. Modules and parameters by name, each once."""

    classes: dict[str, str]
    loss: float = 0.0
    output: Tensor | None = None
    outputs: dict[str, set[str]] = field(default_factory=dict)
    parameters: dict[str, set[str]] = field(default_factory=dict)
    gradients: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    gradient_dtypes: dict[str, set[str]] = field(default_factory=dict)


def _run(module: nn.Module, step: Step, batch: Any, precision: AbstractContextManager[Any], scale: float) -> _Seen:
    module.eval()
    seen = _Seen({name: type(part).__name__ for name, part in module.named_modules()})
    hooks = [part.register_forward_hook(partial(_see_output, seen, name)) for name, part in module.named_modules()]
    seed()
    with precision:
        loss = loss_of(step(module, batch))
    for hook in hooks:  # activation checkpointing would run them again
        hook.remove()
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        raise ValueError(f"expected a loss that can be differentiated, given {type(loss).__name__}")
    (loss * scale).backward()
    seen.loss = loss.item()
    seen.output = None if seen.output is None else _on_host(seen.output)
    _see_gradients(seen, module, scale)
    return seen


def _see_output(seen: _Seen, name: str, part: nn.Module, arguments: Any, output: Any) -> None:
    floating = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    seen.outputs.setdefault(name, set()).update(_name(leaf.dtype) for leaf in floating)
    seen.output = next((leaf for leaf in floating if leaf.ndim), seen.output)


def _see_gradients(seen: _Seen, module: nn.Module, scale: float) -> None:
    known: set[int] = set()
    for name, part in module.named_modules():
        own = {key: p for key, p in part.named_parameters(recurse=False) if id(p) not in known}
        known.update(map(id, own.values()))
        there = {key: parameter.grad for key, parameter in own.items() if parameter.grad is not None}
        seen.parameters[name] = {_name(parameter.dtype) for parameter in own.values()}
        seen.gradient_dtypes[name] = {_name(gradient.dtype) for gradient in there.values()}
        seen.gradients[name] = {key: _on_host(gradient) / scale for key, gradient in there.items()}


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32).to_dense()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compare(seen: _Seen, reference: _Seen) -> NumericsFacts:
    gradients = {name: _squares(seen.gradients[name], reference.gradients[name]) for name in seen.classes}
    outputs = [] if seen.output is None or reference.output is None else [(seen.output, reference.output)]
    return NumericsFacts(
        loss=_finite(seen.loss),
        reference_loss=_finite(reference.loss),
        output_error=_relative([_square(*pair) for pair in outputs]),
        gradient_error=_relative([pair for pairs in gradients.values() for pair in pairs]),
        kinds=[kind for kind in _kinds(seen, gradients) if kind.parameters or kind.outputs],
    )


def _kinds(seen: _Seen, gradients: Mapping[str, list[_Squares]]) -> Iterator[NumericsKind]:
    for kind in dict.fromkeys(seen.classes.values()):
        names = [name for name, other in seen.classes.items() if other == kind]
        yield NumericsKind(
            kind=kind,
            modules=len(names),
            parameters=_union(seen.parameters, names),
            outputs=_union(seen.outputs, names),
            gradients=_union(seen.gradient_dtypes, names),
            gradient_error=_relative([pair for name in names for pair in gradients[name]]),
        )


def _union(dtypes: Mapping[str, set[str]], names: list[str]) -> list[str]:
    return sorted(set().union(*(dtypes.get(name, set()) for name in names)))


_Squares = tuple[float, float]
"""Of a difference and of its reference, summed."""


def _squares(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> list[_Squares]:
    return [_square(ours[name], reference[name]) for name in ours.keys() & reference.keys()]


def _square(ours: Tensor, reference: Tensor) -> _Squares:
    norm = partial(torch.linalg.vector_norm, dtype=torch.float64)
    return norm(ours - reference).item() ** 2, norm(reference).item() ** 2


def _relative(squares: list[_Squares]) -> float | None:
    """The Euclidean norm of all differences over that of all references; None where there is nothing to compare."""
    difference, reference = (sqrt(sum(column)) for column in zip(*squares, strict=True)) if squares else (0.0, 0.0)
    return _finite(difference / reference) if reference else None


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None
