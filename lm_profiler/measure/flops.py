"""FLOPs of one batch of any module, counted on the meta device: no data, no weights, no time on the device.

Convention: a multiply-add is two FLOPs. Only products count (matrices, convolutions, attention), not element-wise
work, norms, softmax and look-ups. Causal attention counts in full, 4·B·T²·D forward per layer, as in PaLM (Chowdhery
et al. 2022, appendix B) and most published MFUs; to count half of it, subtract 2·B·T²·D per layer forward and 4·B·T²·D
backward. That flash kernels compute the scores once more in their backward is their own choice, and not counted.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lm_profiler.measure.module_copy import ModuleCopy, UncopyableError, undisturbed
from lm_profiler.record.run import Flops

META = torch.device("meta")

Step = Callable[[nn.Module, Any], Tensor | Mapping[str, Any] | None]
"""(module, batch) to the loss, or to a mapping with the loss under ``"loss"``."""


class _UncountableError(Exception):
    """The module cannot run on the meta device, or its work is unknown."""


def count_flops(module: nn.Module, step: Step, batch: Any, backward: bool = True) -> Flops | None:
    """FLOPs of ``step(module, batch)`` and, if asked, of the backward pass of its loss.

    It runs once, eagerly, on a meta-device copy (see ``ModuleCopy``), which takes about a second for 48 layers. The
    module, its gradients and the random states stay as they are. What the step prints or warns is dropped, since its
    real run says it too. Sharded weights (DTensor) count whole: right per rank under FSDP2, too much by the number of
    ranks under tensor parallelism. Module hooks do not run, so products made in them are not counted.

    Args:
        module: On any device, in any dtype, compiled or not.
        step: For example ``lambda m, b: m.training_step(b, 0)``. It must reach the weights through its arguments.
        batch: Tensors within dicts, lists, tuples and dataclasses.
        backward: Call ``backward`` on the loss. Without it, gradients are off.

    Returns:
        None where shapes are not enough or the work is unknown. On the copy the step raises RuntimeError (``.item()``,
        masks, an operator that meta lacks, a LightningModule's ``self.trainer``), TypeError (numpy) or ValueError
        (flex_attention refuses meta); it gives no loss; a weight is lazy or not strided; the module is a ScriptModule
        or would communicate (DDP, FSDP1); an operator from outside torch has no ``register_flop_formula``.

    Raises:
        Exception: whatever else ``step`` raises.
    """
    # On the meta device are also the tensors that the step makes without naming one. Anomaly detection reads values.
    with undisturbed(module), META, torch.autograd.set_detect_anomaly(False), torch.set_grad_enabled(backward):
        to_meta = ModuleCopy(_meta_tensor, META)
        try:
            return _count(to_meta(module), step, to_meta(batch), backward)
        except (UncopyableError, _UncountableError):
            return None


def _count(module: nn.Module, step: Step, batch: Any, backward: bool) -> Flops:
    counter = FlopCounterMode(display=False, custom_mapping=_formulas())
    # Which module multiplies is not asked, and the tracker's hooks forbid `autograd.grad` within a step.
    counter.mod_tracker.__enter__ = counter.mod_tracker.__exit__ = lambda *_: None  # type: ignore[method-assign]
    with counter, _ByWork(counter) as by_work:
        try:
            result = step(module, batch)
            loss = result.get("loss") if isinstance(result, Mapping) else result
            if backward and isinstance(loss, Tensor):
                loss.backward()
        except (RuntimeError, TypeError, ValueError) as error:
            raise _UncountableError from error
    if by_work.unknown or (backward and not isinstance(loss, Tensor)):
        raise _UncountableError
    flops = by_work.flops
    return Flops(forward=flops["forward"], backward=flops["backward"], recomputation=flops["recomputation"])


def _meta_tensor(tensor: Tensor) -> Tensor:
    if torch.nn.parameter.is_lazy(tensor) or tensor.layout is not torch.strided:
        raise UncopyableError
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


_ENGINE = {torch.autograd.backward.__code__, torch.autograd.grad.__code__}
_TORCH = {"aten", "prim", "prims", "profiler", "higher_order"}
_UNKNOWN = {f"aten::{name}" for name in ("addbmm", "_int_mm", "_trilinear", "_cdist_forward", "_sparse_addmm")}


class _ByWork(TorchDispatchMode):
    """Entered within a counter: sees each operator before it, and notes whose work the FLOPs were."""

    supports_higher_order_operators = True

    def __init__(self, counter: FlopCounterMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: Counter[str] = Counter()
        self.unknown = False
        self._counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._counter.get_total_flops()
        result = func(*args, **(kwargs or {}))
        if flops := self._counter.get_total_flops() - before:
            self.flops[_work()] += flops
        elif func.namespace not in _TORCH or func.name() in _UNKNOWN:
            self.unknown |= func._overloadpacket not in self._counter.flop_registry
        return result


def _work() -> str:
    """Whose work is done now, by the Python stack: on the meta device, backward runs in the calling thread.

    Recomputed is what ``torch.utils.checkpoint`` runs within a backward pass, and what anybody else runs there with
    gradients on, for a backward pass runs with gradients off unless it will itself be differentiated.
    """
    checkpointed, frame = False, sys._getframe(1)
    while frame := frame.f_back:  # type: ignore[assignment]
        checkpointed |= frame.f_code.co_filename == checkpoint.__file__
        if frame.f_code in _ENGINE:
            again = checkpointed or (torch.is_grad_enabled() and not frame.f_locals["create_graph"])
            return "recomputation" if again else "backward"
    return "forward"


def _product(left: Sequence[int], right: Sequence[int], *_: Any, **__: Any) -> int:
    """Of [G, M, K] and [G, K, N], where G, M and N may lack. Routed groups share the rows, which count once."""
    groups = left[0] if len(left) == len(right) == 3 else 1
    return 2 * groups * prod(left[-2:]) * (right[-1] if len(right) > 1 else 1)


def _formulas() -> dict[Any, Callable[..., int]]:
    """Products that torch's own FlopCounterMode (2.13) counts as nothing."""
    names = ("mv", "dot", "vdot", "_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2")
    found = {getattr(torch.ops.aten, name): _product for name in names if hasattr(torch.ops.aten, name)}
    return {**found, torch.ops.aten.addmv: lambda bias, *factors, **_: _product(*factors)}
