"""Imitates activations that leave the GPU (``save_on_cpu``), and refuses other tensors that leave it.

The other tensors are those that a program's own hooks move when autograd saves them, and optimizer states on the host.
Fake tensors are CPU tensors, for which such a move does nothing, so they would seem to stay on the GPU. This replaces
code of torch, so it is only for a separate process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph

from lm_profiler.measure.fake.live import Uncounted

_init_hooks = graph.saved_tensors_hooks.__init__
_cpu = Tensor.cpu

# Optimizers whose states are on the host: of DeepSpeed (``deepspeed/ops``), torchao 0.19 (``torchao/optim``) and
# Megatron-LM (``megatron/core/optimizer``).
_HOST_OPTIMIZERS = (
    "DeepSpeedCPUAdam",
    "DeepSpeedCPUAdagrad",
    "DeepSpeedCPULion",
    "CPUOffloadOptimizer",
    "HybridDeviceOptimizer",
)
# Tensors with fewer elements, such as counters of steps, may be on the host with any optimizer. Optimizers that offload
# states leave small ones on the GPU (``minimal_size`` in torchao, ``min_8bit_size`` in bitsandbytes).
_LEAST_ELEMENTS = 4096


def imitate_offload() -> None:
    """Make ``save_on_cpu`` keep nothing on the device, for the rest of this process.

    Steps whose own hooks or optimizers move tensors to the host raise Uncounted, because it is unknown how much they
    keep there. Call this in a separate process, because the replacements are never undone.
    """
    pack_hooks = _PackHooks()
    replacements: tuple[tuple[Any, str, Any], ...] = (
        (graph.save_on_cpu, "__init__", _save_elsewhere),
        (graph.saved_tensors_hooks, "__init__", pack_hooks.init_hooks),
        (Tensor, "cpu", pack_hooks.refuse_moves_to_host(_cpu, _goes_to_host_always)),
        (Tensor, "to", pack_hooks.refuse_moves_to_host(Tensor.to, _names_host)),
    )
    for owner, name, replacement in replacements:
        setattr(owner, name, replacement)


def _save_elsewhere(
    hooks: graph.save_on_cpu, pin_memory: bool = False, device_type: str = "cuda"
) -> None:
    """Stand in for the constructor of ``save_on_cpu``: keep only the shape, and make a new tensor for backward."""
    _init_hooks(hooks, _shape_and_dtype, _empty_tensor)


def _shape_and_dtype(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _empty_tensor(shape_and_dtype: tuple[torch.Size, torch.dtype]) -> Tensor:
    shape, dtype = shape_and_dtype
    return torch.empty(shape, dtype=dtype)


class _PackHooks:
    """Notes while one of the program's ``saved_tensors_hooks`` packs a tensor (``is_running``)."""

    def __init__(self) -> None:
        self.is_running = False

    @property
    def init_hooks(self) -> Callable[..., None]:
        """A constructor of ``saved_tensors_hooks`` whose pack hook sets ``is_running``."""

        def init(hooks: Any, pack: Callable[[Tensor], Any], unpack: Any) -> None:
            """Construct ``hooks`` with torch's own constructor, and a ``pack`` that is noted while it runs."""

            def pack_and_note(tensor: Tensor) -> Any:
                """Call the program's ``pack`` hook while ``is_running`` is set."""
                self.is_running = True
                try:
                    return pack(tensor)
                finally:
                    self.is_running = False

            _init_hooks(hooks, pack_and_note, unpack)

        return init

    def refuse_moves_to_host(
        self, move: Callable[..., Tensor], goes_to_host: Callable[..., bool]
    ) -> Callable[..., Tensor]:
        """Return ``move`` with a check that raises Uncounted if a pack hook or an optimizer moves a tensor to the host.

        ``goes_to_host`` returns whether a call of ``move`` with these arguments moves a tensor there.
        """

        def move_or_refuse(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
            """Call ``move``, unless a pack hook or an optimizer would move ``tensor`` to the host."""
            if self.is_running and goes_to_host(*args, **options):
                raise Uncounted(
                    "a hook of the program moves saved tensors to the host; only torch's own save_on_cpu can be planned"
                )
            # Only text counts: a device such as ``parameter.device`` means the GPU, but is the host in a rehearsal.
            if move is _cpu or _names_host_in_words(*args, **options):
                _refuse_if_of_an_optimizer(tensor)
            return move(tensor, *args, **options)

        return move_or_refuse


def refuse_host_optimizers(optimizers: Iterable[object]) -> None:
    """Raise Uncounted if one of ``optimizers`` keeps its states on the host, or in pages that move there."""
    for optimizer in optimizers:
        names = [kind.__name__ for kind in type(optimizer).__mro__]
        if any(name in _HOST_OPTIMIZERS for name in names):
            raise Uncounted(
                f"{names[0]} keeps its states on the host, which cannot be planned"
            )
        # an attribute of optimizers of bitsandbytes (``bitsandbytes/optim/optimizer.py``)
        if getattr(optimizer, "is_paged", False):
            raise Uncounted(
                f"{names[0]} keeps its states in pages, which move between GPU and host, so it cannot be planned; use "
                "an optimizer without pages"
            )


def refuse_host_tensors(result: Any, options: Mapping[str, Any]) -> None:
    """Raise Uncounted if an optimizer made ``result`` on the host: its ``options`` pin it, or name the host."""
    is_on_host = options.get("pin_memory") or options.get("device") == "cpu"
    if is_on_host and isinstance(result, Tensor):
        _refuse_if_of_an_optimizer(result)


def _refuse_if_of_an_optimizer(tensor: Tensor) -> None:
    """Raise Uncounted if the code of an optimizer has called this function, unless ``tensor`` is small."""
    if tensor.numel() < _LEAST_ELEMENTS:
        return
    for frame, _ in walk_stack(sys._getframe(1)):
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.optim.Optimizer):
            raise Uncounted(
                f"{type(caller).__name__} keeps tensors on the host, which cannot be planned"
            )


def _goes_to_host_always(*args: Any, **options: Any) -> bool:
    return True


def _names_host(*args: Any, **options: Any) -> bool:
    values = [*args, *options.values()]
    return any(_is_host(value) for value in values)


def _names_host_in_words(*args: Any, **options: Any) -> bool:
    values = [*args, *options.values()]
    return any(isinstance(value, str) and value == "cpu" for value in values)


def _is_host(value: Any) -> bool:
    if isinstance(value, (str, torch.device)):
        return str(value).partition(":")[0] == "cpu"
    return False
