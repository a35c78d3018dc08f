"""Runs a module's code on fake tensors: its weights are never initialized, its matmuls never computed.

The fake tensors are CPU tensors: a backward pass of fake CUDA tensors aborts a process without CUDA, and meta tensors
choose other attention kernels. Where a GPU differs it is imitated (``prepare``). Only for a process of its own: this
replaces code of torch.
"""

from __future__ import annotations

import gc
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from lm_profiler.measure.fake.cuda import KernelsOfCuda, recompute_alike
from lm_profiler.measure.fake.known import MOST, KnownValues, answer_with_unknown
from lm_profiler.measure.fake.live import LiveCpuBytes
from lm_profiler.measure.fake.live_cuda import LiveCudaBytes
from lm_profiler.torch_names import APPLY, FAKE_TENSOR, FOREACH_DEVICES, FOREACH_TYPES, tree_map

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor
else:
    FakeTensor = FAKE_TENSOR.as_base()


class FakeWorld:
    """Fake tensors, and the bytes they would hold.

    Args:
        gpu: compute capability of the GPU whose bytes are counted; None for the CPU.
    """

    def __init__(self, gpu: tuple[int, int] | None) -> None:
        self.gpu = gpu
        self.mode = KnownValues()
        self.live = LiveCpuBytes() if gpu is None else LiveCudaBytes(gpu)
        self.link: AbstractContextManager[Any] = nullcontext()
        """A mode that sees collectives from the next entry on."""

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Within this context new tensors are fake, and counted."""
        with self.mode, self.live, self.link:
            if self.gpu is None:
                yield
            else:
                with KernelsOfCuda(self.gpu):
                    yield

    def begin(self, weights: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """Count what the module holds, and forget the values of its weights: they change in training."""
        self.mode.forget(weights)
        self.mode.cache_clear()  # the cache keeps tensors alive that were read from a file
        gc.collect()  # tensors in reference cycles must be gone before counting begins
        self.live.begin()
        self.live.see([*weights, *buffers])

    def faked(self, value: Any, resize: Callable[[Sequence[int]], Sequence[int]] = lambda shape: shape) -> Any:
        """Return ``value`` with its real tensors replaced by fake ones of the shapes that ``resize`` returns."""

        def fake(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if leaf.layout is not torch.strided:
                raise NotStrided(f"a batch holds a tensor of {leaf.layout}, whose bytes its shape does not tell")
            shape = tuple(resize(leaf.shape))
            if math.prod(shape) <= MOST and 0 not in leaf.stride() and not leaf.requires_grad:
                return self.mode.known(_repeated(leaf, shape))
            with self.mode:
                made = torch.empty(self._kept(leaf, shape), dtype=leaf.dtype, requires_grad=leaf.requires_grad)
                return made.expand(shape)

        made = tree_map(fake, value)
        self.live.see(made)
        return made

    def _kept(self, real: Tensor, shape: Sequence[int]) -> list[int]:
        """Return the part of ``shape`` that takes memory: expanded dimensions take none until a copy to a GPU."""
        expanded = [step == 0 and self.gpu is None for step in real.stride()]
        return [1 if is_expanded else n for is_expanded, n in zip(expanded, shape, strict=True)]


def _repeated(real: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the values of ``real``, repeated until they fill ``shape``, in a new storage."""
    made = real.detach().cpu().clone()
    for at, n in enumerate(shape):
        if n != real.shape[at]:
            made = made.index_select(at, torch.arange(n) % real.shape[at])
    return made


class NotStrided(Exception):
    """Raised for a tensor that is sparse or nested."""


def prepare(gpu: tuple[int, int] | None) -> None:
    """Replace code of torch so that modules run on fake tensors; the process is of no other use from then on.

    Initialization leaves weights unfilled, since some of it branches on values. Optimizers and clipping use their
    multi-tensor (foreach) variants where they would with real tensors on a ``gpu``, or on the CPU (None). A GPU has no
    kernels of oneDNN: there an LSTM runs as its matmuls and gates.
    """
    for name, _ in inspect.getmembers(nn.init, inspect.isfunction):
        if name.endswith("_") and not name.startswith("_"):
            setattr(nn.init, name, _unfilled)
    APPLY.of(nn.Module)  # raises if this torch has no such method: setting it would have no effect
    setattr(nn.Module, APPLY.name, _apply)
    FakeTensor.__deepcopy__ = _deepcopy  # type: ignore[method-assign]
    torch.backends.mkldnn.set_flags(gpu is None)
    torch.bincount = partial(_bincount, torch.bincount)
    answer_with_unknown()
    # torch.optim has a list of its own beside that of torch.utils, which clipping uses.
    FOREACH_TYPES.find().append(FakeTensor)
    optimizer = vars(sys.modules[torch.optim.Optimizer.__module__])
    optimizer[FOREACH_TYPES.name].append(FakeTensor)
    if gpu is not None:
        recompute_alike(gpu)
        devices = [*FOREACH_DEVICES.find()(), "cpu"]
        optimizer[FOREACH_DEVICES.name] = lambda: devices


def _unfilled(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    """Replace a function of ``nn.init``: the weight's values become unknown."""
    if isinstance(tensor, FakeTensor):
        cast(KnownValues, tensor.fake_mode).forget(tensor)
    return tensor


def _apply(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Replace ``nn.Module._apply``, which swaps data in place and fails here: make new tensors, tied ones once."""
    made: dict[int, tuple[Tensor, nn.Parameter | Tensor]] = {}
    for part in module.modules() if recurse else [module]:
        for key, weight in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            if id(weight) not in made:
                changed = change(weight.detach())
                made[id(weight)] = weight, nn.Parameter(changed, weight.requires_grad and changed.is_floating_point())
            nn.Module.__setattr__(part, key, made[id(weight)][1])
        for key, buffer in list(part.named_buffers(recurse=False, remove_duplicate=False)):
            nn.Module.__setattr__(part, key, made.setdefault(id(buffer), (buffer, change(buffer)))[1])
    return module


def _deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Replace ``Tensor.__deepcopy__``, which copies a storage: a fake tensor has none."""
    made = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = made
    return made


def _bincount(
    count: Callable[..., Tensor], values: Tensor, weights: Tensor | None = None, minlength: int = 0
) -> Tensor:
    """Replace ``torch.bincount``: values are taken to be below ``minlength``, as metrics guarantee."""
    if not minlength:
        return count(values, weights)
    return values.new_zeros(minlength) if weights is None else weights.new_zeros(minlength)
