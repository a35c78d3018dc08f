"""Where a module's code runs on fake tensors: its weights are never filled, its products never computed.

On fake CPU tensors: a backward pass of fake CUDA ones aborts a process without CUDA, and meta tensors take other
kernels of attention. What a GPU would do otherwise is imitated (``prepare``). For a process of its own: code of torch
is replaced in it.
"""

from __future__ import annotations

import gc
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
        gpu: compute capability of the GPU to count as on; None counts as on the CPU.
    """

    def __init__(self, gpu: tuple[int, int] | None) -> None:
        self.gpu = gpu
        self.mode = KnownValues()
        self.live = LiveCpuBytes() if gpu is None else LiveCudaBytes(gpu)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """What is made meanwhile is fake, and counted."""
        with self.mode, self.live:
            if self.gpu is None:
                yield
            else:
                with KernelsOfCuda(self.gpu):
                    yield

    def begin(self, weights: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """What a module holds is counted; what its weights are worth is unknown once it trains."""
        self.mode.forget(weights)
        self.mode.cache_clear()  # it holds what was read from a file
        gc.collect()
        self.live.begin()
        self.live.see([*weights, *buffers])

    def faked(self, value: Any, resize: Callable[[Sequence[int]], Sequence[int]] = lambda shape: shape) -> Any:
        """``value`` with fake tensors in the place of its real ones, of the shape that ``resize`` makes of theirs."""

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
        """What of ``shape`` takes memory: a batch that is expanded stays so, unless it is copied to a GPU."""
        expanded = [step == 0 and self.gpu is None for step in real.stride()]
        return [1 if is_expanded else n for is_expanded, n in zip(expanded, shape, strict=True)]


def _repeated(real: Tensor, shape: Sequence[int]) -> Tensor:
    """The values of ``real`` as often as fill ``shape``, in a storage of their own."""
    made = real.detach().cpu().clone()
    for at, n in enumerate(shape):
        if n != real.shape[at]:
            made = made.index_select(at, torch.arange(n) % real.shape[at])
    return made


class NotStrided(Exception):
    """A tensor that is sparse, or nested."""


def prepare(gpu: tuple[int, int] | None) -> None:
    """Make this process ready; of no use for anything else from then on.

    Weights keep the values they happen to have: some of torch's methods that fill them look at these. Optimizers and
    clipping go over all of them at once where they would with real tensors, on a ``gpu`` or the CPU (None). A GPU has
    no kernels of oneDNN: an LSTM is taken as its products and gates.
    """
    for name, _ in inspect.getmembers(nn.init, inspect.isfunction):
        if name.endswith("_") and not name.startswith("_"):
            setattr(nn.init, name, _unfilled)
    APPLY.of(nn.Module)  # which would otherwise go on as before, without a word
    setattr(nn.Module, APPLY.name, _apply)
    FakeTensor.__deepcopy__ = _deepcopy  # type: ignore[method-assign]
    torch.backends.mkldnn.set_flags(gpu is None)
    torch.bincount = partial(_bincount, torch.bincount)
    answer_with_unknown()
    FOREACH_TYPES.find().append(FakeTensor)
    optimizer = vars(sys.modules[torch.optim.Optimizer.__module__])
    optimizer[FOREACH_TYPES.name].append(FakeTensor)
    if gpu is not None:
        recompute_alike(gpu)
        devices = [*FOREACH_DEVICES.find()(), "cpu"]
        optimizer[FOREACH_DEVICES.name] = lambda: devices


def _unfilled(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    """In the place of what fills a weight."""
    if isinstance(tensor, FakeTensor):
        cast(KnownValues, tensor.fake_mode).forget(tensor)
    return tensor


def _apply(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """In the place of a module's own ``_apply``, which swaps in place and fails: make others, tied ones once."""
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
    """In the place of ``Tensor.__deepcopy__``, which copies a storage: without data there is none to copy."""
    made = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = made
    return made


def _bincount(
    count: Callable[..., Tensor], values: Tensor, weights: Tensor | None = None, minlength: int = 0
) -> Tensor:
    """In the place of ``torch.bincount``: no value is as large as ``minlength``, as metrics have it."""
    if not minlength:
        return count(values, weights)
    return values.new_zeros(minlength) if weights is None else weights.new_zeros(minlength)
