"""Runs a module's code on fake tensors: its weights are never initialized, its matmuls never computed.

The fake tensors are CPU tensors: a backward pass of fake CUDA tensors aborts a process without CUDA, and meta tensors
choose other attention kernels. Differences of a GPU are imitated. Only for a separate process (``prepare``): this
replaces code of torch, and keeps the process from changing files, so that the rehearsed run finds them as they
were.
"""

from __future__ import annotations

import gc
import inspect
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from lm_profiler.measure.fake.cuda import KernelsOfCuda
from lm_profiler.measure.fake.live import LiveBytes, Uncounted
from lm_profiler.measure.fake.values import MOST, KnownValues, answer_with_unknown
from lm_profiler.torch_names import APPLY, DYNAMO, FAKES, tree_map

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor
else:
    FakeTensor = FAKES.as_base("FakeTensor")


class FakeWorld:
    """Fake tensors, and the bytes they would hold.

    Args:
        gpu: compute capability of the GPU whose bytes are counted; None for the CPU.
    """

    def __init__(self, gpu: tuple[int, int] | None) -> None:
        self.gpu = gpu
        self.mode, self.live = KnownValues(), LiveBytes(gpu)
        self.link: AbstractContextManager[Any] = nullcontext()  # a mode that sees collectives from the next entry on

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Within this context new tensors are fake, and counted."""
        with self.mode, self.live, self.link, nullcontext() if self.gpu is None else KernelsOfCuda(self.gpu):
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
                raise Uncounted(f"a batch holds a tensor of {leaf.layout}, whose bytes its shape does not tell")
            shape = tuple(resize(leaf.shape))
            if math.prod(shape) <= MOST and 0 not in leaf.stride() and not leaf.requires_grad:
                return self.mode.known(_repeated(leaf, shape))
            # Expanded dimensions take no memory until a copy to a GPU.
            expanded = [step == 0 and self.gpu is None for step in leaf.stride()]
            kept = [1 if is_expanded else n for is_expanded, n in zip(expanded, shape, strict=True)]
            with self.mode:
                return torch.empty(kept, dtype=leaf.dtype, requires_grad=leaf.requires_grad).expand(shape)

        made = tree_map(fake, value)
        self.live.see(made)
        return made


def _repeated(real: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the values of ``real``, repeated until they fill ``shape``, in a new storage."""
    made = real.detach().cpu().clone()
    for at, n in enumerate(shape):
        if n != real.shape[at]:
            made = made.index_select(at, torch.arange(n) % real.shape[at])
    return made


# -- the process -------------------------------------------------------------------------------------------------------


def prepare(gpu: tuple[int, int] | None) -> None:
    """Replace code of torch so that modules run on fake tensors, and leave files as they are.

    The process serves nothing else afterwards. Initialization leaves weights unfilled, since some of it branches on
    values. A GPU has no kernels of oneDNN: there an LSTM runs as its matmuls and gates.
    """
    leave_files()
    for name, _ in inspect.getmembers(nn.init, inspect.isfunction):
        if name.endswith("_") and not name.startswith("_"):
            setattr(nn.init, name, _unfilled)
    APPLY.of(nn.Module)  # raises if this torch has no such method: setting it would have no effect
    setattr(nn.Module, APPLY.name, _apply)
    FakeTensor.__deepcopy__ = _deepcopy  # type: ignore[method-assign]
    torch.backends.mkldnn.set_flags(gpu is None)
    torch.bincount = _without_values(torch.bincount)
    torch.jit.script = lambda function, *_, **__: function  # type: ignore[assignment]  # scripts could not call what is replaced here
    answer_with_unknown()
    if DYNAMO.loaded() is not None:  # something is compiled already, and its graphs know no fake tensors
        torch.compiler.set_stance("force_eager")


def _unfilled(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    if isinstance(tensor, FakeTensor):
        cast(KnownValues, tensor.fake_mode).forget(tensor)
    return tensor


def _apply(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Replace ``nn.Module._apply``, which swaps data in place and fails here: make new tensors, tied ones only once."""
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


def _without_values(count: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Replace ``torch.bincount``: values are taken to be below ``minlength``, as metrics guarantee."""

    @wraps(count)
    def bincount(values: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        if not minlength:
            return count(values, weights)
        like = values if weights is None else weights
        return like.new_zeros(minlength)

    return bincount


# Python calls audit hooks before it opens or changes a file, and an exception of a hook prevents it. A hook cannot be
# removed. Libraries that write without Python are not seen, except ``torch.save``; neither are other programs.

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# events that change files, and how many paths their arguments begin with
_ONE = ("open", "os.chmod", "os.chown", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.utime")
_CHANGES = {**dict.fromkeys(_ONE, 1), **dict.fromkeys(("os.rename", "os.link", "os.symlink"), 2)}
# events whose second argument is the descriptor of an open folder, or -1, as from ``shutil.rmtree``
_IN_A_FOLDER = {"os.remove", "os.rmdir"}
_TEMPORARY = {"tempfile.mkstemp", "tempfile.mkdtemp"}
# variables that name caches, whose missing files libraries make again
_CACHES = ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME")


class WouldChange(PermissionError):
    """Raised instead of changing a file, as on a read-only disk, which many programs can handle."""


def leave_files() -> None:
    """For the rest of this process allow writes only to its own temporary files and to caches."""
    free = {Path(home).resolve() for home in ("/dev", "/proc", *(os.environ.get(name) or "/dev" for name in _CACHES))}
    free.add(Path("~/.cache").expanduser().resolve())

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if event in _TEMPORARY:
            free.add(Path(given[0]).resolve())  # a new name, so a file of this process
        elif event in _CHANGES and (event != "open" or _writes(*given)):
            within = given[1] if event in _IN_A_FOLDER else -1
            for named in given[: _CHANGES[event]]:
                _check(named, free, "." if within == -1 else f"/proc/self/fd/{within}")

    tempfile.gettempdir()  # finds its folder by writing into candidates once: before the hook
    sys.addaudithook(hook)
    torch.save = _save


def _writes(named: Any, mode: Any, flags: int | None) -> bool:
    """Return whether the file is opened for writing; ``tempfile`` names a folder where it opens a file in it."""
    return bool((flags or 0) & _WRITES) and not (isinstance(named, (str, bytes)) and Path(os.fsdecode(named)).is_dir())


def _check(named: Any, free: set[Path], within: str) -> None:
    if not isinstance(named, (str, bytes)):  # an open file
        return
    path = Path(within, os.fsdecode(named)).resolve()
    if free.isdisjoint((path, *path.parents)) and "__pycache__" not in path.parts:
        raise _refused(path.name)


def _save(obj: object, f: Any, *_: Any, **__: Any) -> None:
    """Replace ``torch.save``, which writes without Python: refuse."""
    raise _refused(Path(f).name if isinstance(f, (str, os.PathLike)) else "a file")


def _refused(name: str) -> WouldChange:
    return WouldChange(f"it would write {name!r}, which is left to the run")
