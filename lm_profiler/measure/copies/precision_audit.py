"""Finds what a precision does to a step: its actual dtypes, and how far its results are from float32's.

The step runs twice on copies of the module, once as it is trained and once in float32: the same weights and batch, cast
up exactly, in eval mode (two precisions draw different dropout masks from one seed), eagerly, with the same seeds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import isfinite, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from lm_profiler.measure.copies.module_copy import ModuleCopy, seed, undisturbed
from lm_profiler.measure.device.precision import Switches, operators_with_precision
from lm_profiler.record.run import NumericsFacts, NumericsKind
from lm_profiler.torch_names import tree_leaves

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
    """Within this context float32 is exact: no TF32 or bf16 inside matmuls and convolutions."""
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
    """The results of one run, as float32 on the host, by class of modules; shared parameters count once."""

    modules: Counter[str]
    loss: float = 0.0
    loss_dtype: str | None = None
    # the output of the ``last`` module that returned a floating-point tensor with dimensions
    output: dict[str, Tensor] = field(default_factory=dict)
    # the dtypes of a class's ``parameters``, ``outputs`` and ``gradients``
    dtypes: defaultdict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    gradients: defaultdict[str, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))


def _run(module: nn.Module, step: Step, batch: Any, precision: AbstractContextManager[Any], scale: float) -> _Seen:
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
    seen.loss, seen.loss_dtype = loss.item(), str(loss.dtype).removeprefix("torch.")
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
    """Return the summed squares of the differences, and of the reference, over the tensors that both have."""
    norm = partial(torch.linalg.vector_norm, dtype=torch.float64)
    pairs = [(ours[name], reference[name]) for name in ours.keys() & reference.keys()]
    return sum(norm(a - b).item() ** 2 for a, b in pairs), sum(norm(b).item() ** 2 for _, b in pairs)


def _relative(squares: Iterable[tuple[float, float]]) -> float | None:
    """Return the Euclidean norm of the differences over that of the references; None without references."""
    difference, reference = (sqrt(sum(column)) for column in zip(*squares, strict=True))
    return _finite(difference / reference) if reference else None


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None
