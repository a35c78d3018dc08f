"""Imitates activations that leave the GPU: ``save_on_cpu``, and hooks of a program that move what autograd saves.

Fake tensors are CPU tensors, for which such a move does nothing, so that they would seem to stay on the GPU.
Only for a separate process: this replaces code of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph

from lm_profiler.measure.fake.live import Uncounted

_init_hooks = graph.saved_tensors_hooks.__init__


def imitate_offload() -> None:
    """Have ``save_on_cpu`` keep nothing on the device, and refuse steps whose own hooks move tensors to the host."""
    packing = _Packing()
    replacements: tuple[tuple[Any, str, Any], ...] = (
        (graph.save_on_cpu, "__init__", _save_elsewhere),
        (graph.saved_tensors_hooks, "__init__", packing.init_hooks),
        (Tensor, "cpu", packing.refusing(Tensor.cpu, _always)),
        (Tensor, "to", packing.refusing(Tensor.to, _names_host)),
    )
    for owner, name, replacement in replacements:
        setattr(owner, name, replacement)


def _save_elsewhere(
    hooks: graph.save_on_cpu, pin_memory: bool = False, device_type: str = "cuda"
) -> None:
    """Replace the constructor of ``save_on_cpu``: keep a shape, and make a new tensor for backward."""
    _init_hooks(hooks, _shape_of, _on_device_again)


def _shape_of(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _on_device_again(kept: tuple[torch.Size, torch.dtype]) -> Tensor:
    shape, dtype = kept
    return torch.empty(shape, dtype=dtype)


class _Packing:
    """Whether a hook of the program packs a tensor now."""

    def __init__(self) -> None:
        self.is_running = False

    @property
    def init_hooks(self) -> Callable[..., None]:
        """The constructor of ``saved_tensors_hooks``, which notes when its hook runs."""

        def init(hooks: Any, pack: Callable[[Tensor], Any], unpack: Any) -> None:
            def pack_and_note(tensor: Tensor) -> Any:
                self.is_running = True
                try:
                    return pack(tensor)
                finally:
                    self.is_running = False

            _init_hooks(hooks, pack_and_note, unpack)

        return init

    def refusing(
        self, move: Callable[..., Tensor], goes_to_host: Callable[..., bool]
    ) -> Callable[..., Tensor]:
        """Return ``move`` that refuses to move what a hook packs to the host."""

        def move_or_refuse(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
            if self.is_running and goes_to_host(*args, **options):
                raise Uncounted(
                    "a hook of the program moves saved tensors to the host; only save_on_cpu of torch can be planned"
                )
            return move(tensor, *args, **options)

        return move_or_refuse


def _always(*args: Any, **options: Any) -> bool:
    return True


def _names_host(*args: Any, **options: Any) -> bool:
    values = [*args, *options.values()]
    return any(_is_host(value) for value in values)


def _is_host(value: Any) -> bool:
    if isinstance(value, (str, torch.device)):
        return str(value).partition(":")[0] == "cpu"
    return False
