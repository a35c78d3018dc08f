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
from lm_profiler.measure.fake.flex import imitate_flex_attention
from lm_profiler.measure.fake.live import LiveBytes, Uncounted
from lm_profiler.measure.fake.offload import imitate_offload
from lm_profiler.measure.fake.values import (
    MOST_ELEMENTS,
    KnownValues,
    answer_with_unknown,
)
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
        self.mode = KnownValues()
        self.live = LiveBytes(gpu)
        # a mode that sees collectives from the next entry on
        self.link_mode: AbstractContextManager[Any] = nullcontext()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Within this context new tensors are fake, and counted."""
        kernels: AbstractContextManager[Any] = (
            nullcontext() if self.gpu is None else KernelsOfCuda(self.gpu)
        )
        with self.mode, self.live, self.link_mode, kernels:
            yield

    def begin(self, weights: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """Count what the module holds, and forget the values of its weights: they change in training."""
        self.mode.forget(weights)
        self.mode.cache_clear()  # the cache keeps tensors alive that were read from a file
        gc.collect()  # tensors in reference cycles must be gone before counting begins
        self.live.begin()
        self.live.count_storages([*weights, *buffers])

    def fake_copy(
        self,
        value: Any,
        resize: Callable[[Sequence[int]], Sequence[int]] = lambda shape: shape,
    ) -> Any:
        """Return ``value`` with its real tensors replaced by fake ones of the shapes that ``resize`` returns."""

        def fake(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self._fake_tensor(leaf, tuple(resize(leaf.shape)))
            return leaf

        faked_value = tree_map(fake, value)
        self.live.count_storages(faked_value)
        return faked_value

    def _fake_tensor(self, real: Tensor, shape: tuple[int, ...]) -> Any:
        """Return a fake tensor of ``shape`` in place of ``real``; a small one keeps its values, repeated to fill it."""
        if real.layout is not torch.strided:
            raise Uncounted(
                f"a batch holds a tensor of {real.layout}, whose size in bytes does not follow from its shape"
            )
        # Values are kept in a plain copy: it has no expanded dimensions, and no gradient.
        is_small = math.prod(shape) <= MOST_ELEMENTS
        is_expanded = 0 in real.stride()
        keeps_values = is_small and not is_expanded and not real.requires_grad
        if keeps_values:
            return self.mode.with_value(_repeated(real, shape))
        stored_shape = list(shape)
        if self.gpu is None:
            # Expanded dimensions take no memory until a copy to a GPU.
            for axis, stride in enumerate(real.stride()):
                if stride == 0:
                    stored_shape[axis] = 1
        with self.mode:
            stored = torch.empty(
                stored_shape, dtype=real.dtype, requires_grad=real.requires_grad
            )
            return stored.expand(shape)


def _repeated(real: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the values of ``real``, repeated until they fill ``shape``, in a new storage."""
    repeated = real.detach().cpu().clone()
    for axis, size in enumerate(shape):
        real_size = real.shape[axis]
        if size != real_size:
            repeated = repeated.index_select(axis, torch.arange(size) % real_size)
    return repeated


# -- the process -------------------------------------------------------------------------------------------------------


def prepare(gpu: tuple[int, int] | None) -> None:
    """Replace code of torch so that modules run on fake tensors, and forbid the process to write files.

    The process serves nothing else afterwards. ``gpu`` is the compute capability to imitate, None for the CPU.
    """
    forbid_writing()
    _leave_weights_unfilled()
    # raises if this torch has no such method: setting it would have no effect
    APPLY.get(nn.Module)
    setattr(nn.Module, APPLY.name, _apply)
    FakeTensor.__deepcopy__ = _deepcopy  # type: ignore[method-assign]
    # A GPU has no kernels of oneDNN: there an LSTM runs as its matmuls and gates.
    is_cpu = gpu is None
    torch.backends.mkldnn.set_flags(is_cpu)
    if not is_cpu:
        imitate_offload()
    torch.bincount = _without_values(torch.bincount)
    torch.jit.script = _unscripted  # type: ignore[assignment]
    torch.compile = _without_effect(torch.compile)
    imitate_flex_attention()
    answer_with_unknown()
    if DYNAMO.loaded() is not None:
        # something is compiled already, and its graphs do not accept fake tensors
        torch.compiler.set_stance("force_eager")


def _leave_weights_unfilled() -> None:
    """Replace the initializers of ``nn.init``: some of them branch on values, which fake tensors lack."""
    for name, _ in inspect.getmembers(nn.init, inspect.isfunction):
        is_initializer = name.endswith("_") and not name.startswith("_")
        if is_initializer:
            setattr(nn.init, name, _unfilled)


def _unfilled(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    if isinstance(tensor, FakeTensor):
        cast(KnownValues, tensor.fake_mode).forget(tensor)
    return tensor


def _unscripted(function: Any, *_: Any, **__: Any) -> Any:
    """Replace ``torch.jit.script``: a script could not call what is replaced here."""
    return function


def _without_effect(compile_code: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``torch.compile``: what it returns runs without a compiler, whose graphs do not accept fake tensors."""

    @wraps(compile_code)
    def compile_or_run(*args: Any, **options: Any) -> Any:
        torch.compiler.set_stance("force_eager")
        compiled = compile_code(*args, **options)
        is_function = bool(args) and inspect.isfunction(args[0])
        return _noting_calls(compiled) if is_function else compiled

    return compile_or_run


# the names of functions that were to run compiled, such as the update of an optimizer
COMPILED_FUNCTIONS_CALLED: set[str] = set()


def _noting_calls(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``compiled`` that notes its calls in ``COMPILED_FUNCTIONS_CALLED``."""

    @wraps(compiled)
    def note_and_call(*args: Any, **options: Any) -> Any:
        COMPILED_FUNCTIONS_CALLED.add(compiled.__name__)
        return compiled(*args, **options)

    return note_and_call


def _apply(
    module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Replace ``nn.Module._apply``, which swaps data in place and fails here: make new tensors, tied ones only once."""
    # new tensors by the identity of the old ones, which are kept so that no other tensor gets their identity
    replaced: dict[int, tuple[Tensor, nn.Parameter | Tensor]] = {}
    parts = module.modules() if recurse else [module]
    for part in parts:
        for name, weight in list(
            part.named_parameters(recurse=False, remove_duplicate=False)
        ):
            if id(weight) not in replaced:
                changed = change(weight.detach())
                requires_grad = weight.requires_grad and changed.is_floating_point()
                replaced[id(weight)] = weight, nn.Parameter(changed, requires_grad)
            _, new_weight = replaced[id(weight)]
            nn.Module.__setattr__(part, name, new_weight)
        for name, buffer in list(
            part.named_buffers(recurse=False, remove_duplicate=False)
        ):
            changed = change(buffer)
            _, new_buffer = replaced.setdefault(id(buffer), (buffer, changed))
            nn.Module.__setattr__(part, name, new_buffer)
    return module


def _deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Replace ``Tensor.__deepcopy__``, which copies a storage: a fake tensor has none."""
    copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = copy
    return copy


def _without_values(count: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Replace ``torch.bincount``: values are taken to be below ``minlength``, as metrics guarantee."""

    @wraps(count)
    def bincount(
        values: Tensor, weights: Tensor | None = None, minlength: int = 0
    ) -> Tensor:
        if not minlength:
            return count(values, weights)
        like = values if weights is None else weights
        return like.new_zeros(minlength)

    return bincount


# Python calls audit hooks before it opens or changes a file, and an exception of a hook prevents it. A hook cannot be
# removed. Libraries that write without Python are not seen, except ``torch.save``; neither are other programs.

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# events that change files, and how many paths their arguments begin with
_CHANGES = {
    "open": 1,
    "os.chmod": 1,
    "os.chown": 1,
    "os.mkdir": 1,
    "os.remove": 1,
    "os.rmdir": 1,
    "os.truncate": 1,
    "os.utime": 1,
    "os.rename": 2,
    "os.link": 2,
    "os.symlink": 2,
}
# events whose second argument is the descriptor of an open folder, or -1, as from ``shutil.rmtree``
_IN_A_FOLDER = {"os.remove", "os.rmdir"}
_TEMPORARY = {"tempfile.mkstemp", "tempfile.mkdtemp"}
# variables that name caches, whose missing files libraries make again
_CACHES = ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME")


class WouldChange(PermissionError):
    """Raised instead of changing a file, as on a read-only disk, which many programs can handle."""


def forbid_writing() -> None:
    """For the rest of this process allow writes only to its own temporary files and to caches."""
    writable = {
        Path("/dev").resolve(),
        Path("/proc").resolve(),
        Path("~/.cache").expanduser().resolve(),
    }
    for variable in _CACHES:
        folder = os.environ.get(variable)
        if folder:
            writable.add(Path(folder).resolve())

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        """Check each file that Python is about to change (an audit hook)."""
        if event in _TEMPORARY:
            # a new name, so a file of this process
            writable.add(Path(arguments[0]).resolve())
            return
        changes_file = event in _CHANGES and (
            event != "open" or _opens_for_writing(*arguments)
        )
        if not changes_file:
            return
        folder = "."
        if event in _IN_A_FOLDER and arguments[1] != -1:
            folder = f"/proc/self/fd/{arguments[1]}"
        paths = arguments[: _CHANGES[event]]
        for path in paths:
            _check(path, writable, folder)

    tempfile.gettempdir()  # finds its folder by writing into candidates once: before the hook
    sys.addaudithook(hook)
    torch.save = _save


def _opens_for_writing(path: Any, mode: Any, flags: int | None) -> bool:
    """Return whether the file is opened for writing; ``tempfile`` names a folder where it opens a file in it."""
    has_writing_flag = bool((flags or 0) & _WRITES)
    if not has_writing_flag:
        return False
    is_folder = isinstance(path, (str, bytes)) and Path(os.fsdecode(path)).is_dir()
    return not is_folder


def _check(path: Any, writable: set[Path], folder: str) -> None:
    """Raise ``WouldChange`` unless ``path``, relative to ``folder``, is or lies in something ``writable``."""
    if not isinstance(path, (str, bytes)):  # an open file
        return
    resolved = Path(folder, os.fsdecode(path)).resolve()
    is_writable = not writable.isdisjoint((resolved, *resolved.parents))
    if not is_writable and "__pycache__" not in resolved.parts:
        raise _refused(resolved.name)


def _save(obj: object, f: Any, *_: Any, **__: Any) -> None:
    """Replace ``torch.save``, which writes without Python: refuse."""
    name = "a file"
    if isinstance(f, (str, os.PathLike)):
        name = Path(f).name
    raise _refused(name)


def _refused(name: str) -> WouldChange:
    return WouldChange(f"it would write {name!r}, which is left to the run")
