"""Counts the FLOPs of a step while it runs, from the real shapes of every operator.

Nothing runs twice, and results do not change. Backward passes are seen too, also where autograd runs them in threads of
its own (on CUDA): it hands the caller's dispatch modes on to them (``ThreadLocalState`` in torch's ``graph_task.h``).
Not seen is what never passes torch's dispatcher: graphs of torch.compile, replayed CUDA graphs, kernels of extensions
that bypass torch, and threads that a step starts itself.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from traceback import walk_stack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import enable_reentrant_dispatch
from torch.utils import checkpoint

from lm_profiler.measure.boundary import comes_from_outside, said
from lm_profiler.measure.counts.flop_formulas import OVERLOAD, TORCHS_OWN, UncountableError, formula_of
from lm_profiler.measure.counts.traffic import ForwardTraffic
from lm_profiler.record.run import Flops
from lm_profiler.torch_names import (
    DISPATCH_KEY,
    DISPATCH_MODE,
    EXCLUDED_KEYS,
    FORCED_KEYS,
    GRAPH_TASK,
    INCLUDED_KEYS,
    tree_leaves,
)

_ENGINE = {torch.autograd.backward.__code__, torch.autograd.grad.__code__}
# the package of fake tensors, on which torch also tries operators out to infer shapes
_SHAPES_ALONE = "torch._subclasses"
WORK = ("forward", "backward", "recomputation")
_PLAIN = Tensor.__torch_dispatch__


class _Handling(NamedTuple):
    """How an operator is called; by default as it is, and uncounted."""

    passed_on: bool = False  # its tensors wrap others, whose operators arrive here one by one
    composite: bool = False  # it consists of other operators, which are counted in its place
    counted: bool = False
    around: AbstractContextManager[None] = nullcontext()


class FlopCounter(DISPATCH_MODE.as_base()):  # type: ignore[misc]  # a class that is looked up at run time
    """Counts the matmuls of all operators that run while the mode is entered and ``counting``.

    Of tensors that wrap others (DTensor, sharded by FSDP2 or tensor parallelism; jagged and quantized ones) those parts
    count that this process multiplies. An error while counting makes the count unknown, and has no other effect.

    Args:
        traffic: sees all operators outside backward passes.
        on_shapes: whether the step itself runs on fake tensors; otherwise torch only tries operators out on them.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # so that torch does not import its compiler to keep it away; nothing compiled runs in here

    def __init__(self, traffic: ForwardTraffic | None = None, on_shapes: bool = False) -> None:
        super().__init__()
        GRAPH_TASK.find()  # raises here, before a step, where this torch lacks it
        self._on_shapes = on_shapes
        self._traffic = traffic
        self.counting = True
        self.unknown: str | None = None
        """Why the count cannot be trusted."""
        self._flops: Counter[tuple[str, str]] = Counter()
        self._formula_of = cache(formula_of)
        self._is_composite = cache(_is_composite)
        self._thread = threading.get_ident()

    def flops(self) -> Flops:
        """Return what was counted so far.

        Raises:
            UncountableError: An operator ran whose work is unknown.
        """
        if self.unknown is not None:
            raise UncountableError(self.unknown)
        forward, backward, again = (sum(self.by_dtype().get(work, {}).values()) for work in WORK)
        return Flops(forward=forward, backward=backward, recomputation=again)

    def by_dtype(self) -> dict[str, dict[str, int]]:
        """Return the same by kind of work and dtype of the factors, as torch names it."""
        counted: dict[str, dict[str, int]] = {}
        for (work, dtype), flops in self._flops.items():
            counted.setdefault(work, {})[dtype] = flops
        return counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            call = self._call_of(func, types)
        except BaseException as error:
            self._lose(func, error)
            call = _Handling()
        if call.passed_on:
            return NotImplemented
        if call.composite:
            with enable_reentrant_dispatch(), self:  # so that its parts run under autocast, as without this mode
                return func.decompose(*args, **kwargs)
        with call.around:
            result = func(*args, **kwargs)
        if call.counted:
            try:
                self._see(func, args, kwargs, result)
            except BaseException as error:
                self._lose(func, error)
        return result

    def _call_of(self, func: Any, types: Any) -> _Handling:
        """Decide how ``func`` is called. This may run code of a user's tensor class, and so may raise anything."""
        own = [kind for kind in types if kind.__torch_dispatch__ is not _PLAIN]
        shapes_alone = any(str(kind.__module__).startswith(_SHAPES_ALONE) for kind in own)
        if own and not shapes_alone:
            return _Handling(passed_on=True)
        asks = func.namespace == "prim"  # queries such as the device of a fake tensor
        return _Handling(
            composite=not shapes_alone and self._is_composite(func),
            counted=self.counting and not asks and shapes_alone <= self._on_shapes,
            around=nullcontext() if func.namespace in TORCHS_OWN else _autocast_of_caller(),
        )

    def _see(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count the operator, and show it to ``traffic`` outside backward passes."""
        if self.unknown is None:
            try:
                self._count(func, args, kwargs, result)
            except BaseException as error:
                self._lose(func, error)
        if self._traffic is not None and GRAPH_TASK.find()() == -1:
            try:
                self._traffic.see(func, args, kwargs, result)
            except BaseException as error:
                if comes_from_outside(error):
                    raise
                self._traffic.lost = True

    def _lose(self, func: Any, error: BaseException) -> None:
        """Make the count unknown; an error of counting must not reach the step."""
        if comes_from_outside(error):
            raise error
        self.unknown = str(error) if isinstance(error, UncountableError) else f"{func}: {said(error)}"

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        formula = self._formula_of(func)
        if formula is not None and (flops := formula(*args, **kwargs, out_val=result)):
            self._flops[_work(self._thread), _dtype(args, kwargs)] += flops


def _dtype(args: Any, kwargs: Any) -> str:
    """Return the dtype of a matmul's factors: the first tensor is one of them, or a bias of their dtype."""
    first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    return str(first.dtype).removeprefix("torch.")


def _is_composite(func: Any) -> bool:
    """Return whether ``func`` consists of other operators on every device; under inference mode such arrive whole."""
    if not isinstance(func, OVERLOAD):
        return False
    keys: Any = ("CompositeImplicitAutograd", "CPU", "CUDA")
    composite, cpu, cuda = (func.has_kernel_for_dispatch_key(key) for key in keys)
    return bool(composite and not cpu and not cuda)


def _autocast_of_caller() -> AbstractContextManager[None]:
    """Return a context with the caller's autocast, which torch turns off before it calls a mode.

    A user's custom operator may call others, which must run as they would without this mode.
    """
    excluded, included, keys = EXCLUDED_KEYS.find(), INCLUDED_KEYS.find(), DISPATCH_KEY.find()
    now = excluded()
    autocast = type(now)(keys.AutocastCPU) | type(now)(keys.AutocastCUDA)
    with enable_reentrant_dispatch():
        off = excluded() & autocast
    guard: AbstractContextManager[None] = FORCED_KEYS.find()(included(), (now - autocast) | off)
    return guard


def _work(caller: int) -> str:
    """Return which kind of ``WORK`` this thread does now; ``caller`` is the thread that called autograd.

    Recomputation is what ``torch.utils.checkpoint`` runs within a backward pass, and whatever else runs there with
    gradients on: a backward pass has them off unless it will itself be differentiated (``create_graph``).
    """
    if GRAPH_TASK.find()() == -1:
        return "forward"
    checkpointed = engine = None
    for frame, _ in walk_stack(sys._getframe(1)):
        if frame.f_code in _ENGINE:
            engine = frame
            break
        checkpointed = checkpointed or frame.f_code.co_filename == checkpoint.__file__
    if engine is None:  # a thread of autograd's own
        callers = walk_stack(sys._current_frames()[caller])
        engine = next((frame for frame, _ in callers if frame.f_code in _ENGINE), None)
    differentiated = engine is not None and engine.f_locals["create_graph"]
    return "recomputation" if checkpointed or (torch.is_grad_enabled() and not differentiated) else "backward"
