"""Runs a module's code on fake tensors: its weights are never initialized, its matmuls never computed.

The fake tensors are CPU tensors: a backward pass of fake CUDA tensors aborts a process without CUDA, and meta tensors
choose other attention kernels. What differs on a GPU is imitated. This is only for a separate process, because
``prepare`` replaces code of torch. It also prevents the process from changing files, so that the real run finds them
unchanged.
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
    """Makes fake tensors, and counts the bytes that they would hold.

    Args:
        gpu: compute capability of the GPU whose bytes are counted; None for the CPU.
    """

    def __init__(self, gpu: tuple[int, int] | None) -> None:
        self.gpu = gpu
        self.mode = KnownValues()
        self.live = LiveBytes(gpu)
        # a mode that observes collectives; ``inside`` enters it
        self.link_mode: AbstractContextManager[Any] = nullcontext()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Within this context, new tensors are fake, and their bytes are counted."""
        kernels: AbstractContextManager[Any] = nullcontext()
        if self.gpu is not None:
            kernels = KernelsOfCuda(self.gpu)
        with self.mode, self.live, self.link_mode, kernels:
            yield

    def begin(self, weights: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """Begin to count: first the tensors of the module. Forget the values of weights, which change in training."""
        self.mode.forget(weights)
        self.mode.cache_clear()  # the cache keeps tensors alive that were read from a file
        gc.collect()  # frees tensors in reference cycles, so that they do not count
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
        """Return a fake tensor of ``shape`` in place of ``real``; a small one keeps its values, repeated to fill it.

        Raises:
            Uncounted: ``real`` is sparse.
        """
        if real.layout is not torch.strided:
            raise Uncounted(
                f"a batch holds a tensor of {real.layout}, whose size in bytes does not follow from its shape"
            )
        # A tensor with values is a plain copy, which has no expanded dimensions and no gradient.
        is_small = math.prod(shape) <= MOST_ELEMENTS
        is_expanded = 0 in real.stride()
        keeps_values = is_small and not is_expanded and not real.requires_grad
        if keeps_values:
            return self.mode.with_value(_repeated_to_fill(real, shape))
        stored_shape = list(shape)
        if self.gpu is None:
            # Expanded dimensions, whose stride is 0, take no memory; copied to a GPU they would.
            for axis, stride in enumerate(real.stride()):
                if stride == 0:
                    stored_shape[axis] = 1
        with self.mode:
            stored = torch.empty(
                stored_shape, dtype=real.dtype, requires_grad=real.requires_grad
            )
            return stored.expand(shape)


def _repeated_to_fill(real: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the values of ``real``, repeated until they fill ``shape``, in a new storage."""
    repeated = real.detach().cpu().clone()
    for axis, size in enumerate(shape):
        real_size = real.shape[axis]
        if size != real_size:
            repeated = repeated.index_select(axis, torch.arange(size) % real_size)
    return repeated


# -- the process -------------------------------------------------------------------------------------------------------


def prepare(gpu: tuple[int, int] | None) -> None:
    """Replace code of torch so that modules run on fake tensors, and prevent the process from writing files.

    The process cannot be used for anything else afterwards. ``gpu`` is the compute capability to imitate, None for the
    CPU.
    """
    forbid_writing()
    _leave_weights_unfilled()
    # Raises if this version of torch has no such method, because then replacing it would have no effect.
    APPLY.get(nn.Module)
    setattr(nn.Module, APPLY.name, _apply)
    FakeTensor.__deepcopy__ = _deepcopy  # type: ignore[method-assign]
    # oneDNN's kernels do not exist on a GPU. Without them an LSTM runs as its matmuls and gates.
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
        # The program has compiled something already, and its graphs do not accept fake tensors.
        torch.compiler.set_stance("force_eager")


def _leave_weights_unfilled() -> None:
    """Replace the initializers of ``nn.init``: some of them branch on values, which fake tensors lack."""
    for name, _ in inspect.getmembers(nn.init, inspect.isfunction):
        is_initializer = name.endswith("_") and not name.startswith("_")
        if is_initializer:
            setattr(nn.init, name, _unfilled)


def _unfilled(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    """Stand in for an initializer of ``nn.init``: return ``tensor``, whose values are unknown from now on."""
    if isinstance(tensor, FakeTensor):
        cast(KnownValues, tensor.fake_mode).forget(tensor)
    return tensor


def _unscripted(function: Any, *_: Any, **__: Any) -> Any:
    """Stand in for ``torch.jit.script``: a script could not call the replaced functions."""
    return function


def _without_effect(compile_code: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of ``torch.compile`` whose results run eagerly: graphs do not accept fake tensors."""

    @wraps(compile_code)
    def compile_or_run(*args: Any, **options: Any) -> Any:
        """Call ``torch.compile``; calls of a function that it compiles are noted."""
        torch.compiler.set_stance("force_eager")
        compiled = compile_code(*args, **options)
        is_function = bool(args) and inspect.isfunction(args[0])
        return _noting_calls(compiled) if is_function else compiled

    return compile_or_run


# names of functions that the program compiles and has called, such as the update of an optimizer
COMPILED_FUNCTIONS_CALLED: set[str] = set()


def _noting_calls(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that notes its name in ``COMPILED_FUNCTIONS_CALLED`` and calls ``compiled``."""

    @wraps(compiled)
    def note_and_call(*args: Any, **options: Any) -> Any:
        COMPILED_FUNCTIONS_CALLED.add(compiled.__name__)
        return compiled(*args, **options)

    return note_and_call


def _apply(
    module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Stand in for ``nn.Module._apply``, whose swap of data in place fails on fake tensors: make new tensors instead.

    A tied tensor is replaced by one new tensor everywhere.
    """
    # the identity of an old tensor to that tensor, kept alive so that its identity is not reused, and the new tensor
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
    """Stand in for ``Tensor.__deepcopy__``, which copies the storage: fake tensors have no data to copy."""
    copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = copy
    return copy


def _without_values(count: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a replacement of ``torch.bincount`` that assumes values below ``minlength``, as metrics guarantee."""

    @wraps(count)
    def bincount(
        values: Tensor, weights: Tensor | None = None, minlength: int = 0
    ) -> Tensor:
        """Return ``minlength`` zeros; without it, call torch's own function, whose result depends on the values."""
        if not minlength:
            return count(values, weights)
        like = values if weights is None else weights
        return like.new_zeros(minlength)

    return bincount


# Python calls audit hooks before it opens or changes a file; if a hook raises, the file is not touched. A hook cannot
# be removed. Writes by libraries without Python are not seen, except those of ``torch.save``, nor those of other
# programs.

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
# environment variables that name folders of caches, which libraries fill again if files are missing
_CACHES = ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME")


class WouldChange(PermissionError):
    """Raised instead of changing a file; like the error of a read-only disk, which many programs handle."""


def forbid_writing() -> None:
    """Allow this process to write only to its own temporary files and to caches from now on."""
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
            # The file is new, so it is one of this process.
            writable.add(Path(arguments[0]).resolve())
            return
        if event not in _CHANGES:
            return
        if event == "open" and not _opens_for_writing(*arguments):
            return
        folder = "."
        if event in _IN_A_FOLDER and arguments[1] != -1:
            folder = f"/proc/self/fd/{arguments[1]}"
        paths = arguments[: _CHANGES[event]]
        for path in paths:
            _refuse_unless_writable(path, writable, folder)

    # before the hook, because the first call writes into candidates for the folder
    tempfile.gettempdir()
    sys.addaudithook(hook)
    torch.save = _refuse_to_save


def _opens_for_writing(path: Any, mode: Any, flags: int | None) -> bool:
    """Return whether ``path`` is a file that is opened for writing."""
    has_writing_flag = bool((flags or 0) & _WRITES)
    if not has_writing_flag:
        return False
    # ``tempfile`` opens unnamed files with the path of their folder.
    is_folder = isinstance(path, (str, bytes)) and Path(os.fsdecode(path)).is_dir()
    return not is_folder


def _refuse_unless_writable(path: Any, writable: set[Path], folder: str) -> None:
    """Raise ``WouldChange`` unless ``path``, relative to ``folder``, is in one of the ``writable`` paths."""
    if not isinstance(path, (str, bytes)):  # an open file
        return
    resolved = Path(folder, os.fsdecode(path)).resolve()
    is_writable = not writable.isdisjoint((resolved, *resolved.parents))
    if not is_writable and "__pycache__" not in resolved.parts:
        raise _refusal(resolved.name)


def _refuse_to_save(obj: object, f: Any, *_: Any, **__: Any) -> None:
    """Stand in for ``torch.save``, which writes files from C++, where no replaced Python function is called: raise."""
    name = "a file"
    if isinstance(f, (str, os.PathLike)):
        name = Path(f).name
    raise _refusal(name)


def _refusal(name: str) -> WouldChange:
    return WouldChange(f"it would write {name!r}, which only a real run may do")
