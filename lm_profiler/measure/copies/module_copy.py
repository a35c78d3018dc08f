"""Copies a module for steps that do not train it, and runs such steps without side effects."""

from __future__ import annotations

import copy
import dataclasses
import io
import random
import types
import warnings
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lm_profiler.torch_names import COMPILED_CALL

_UNCOPYABLE = {"DistributedDataParallel", "FullyShardedDataParallel"}  # by name: importing them is slow
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class UncopyableError(Exception):
    """Raised where a module cannot be copied, or its copy would communicate."""


class ModuleCopy:
    """Copies modules, containers, tensors and random generators; everything else is shared with the original.

    Modules are copied as pickle does (``__getstate__``): metrics rewrap their methods, and a LightningModule drops its
    trainer. A deepcopy would copy data sets and loggers too, and fail at locks and files. What occurs twice is copied
    once, which keeps weights tied. Other objects are shared, with any tensors in them. The copy runs eagerly and
    without module hooks: FSDP2 gathers the real weights in hooks, and users' hooks store what they see.

    Args:
        tensor: copies the data of one tensor.
        device: takes the place of every device that the module remembers; None keeps them.
    """

    def __init__(self, tensor: Callable[[Tensor], Tensor], device: torch.device | None = None) -> None:
        self._tensor = tensor
        self._device = device
        self._made: dict[int, tuple[Any, Any]] = {}  # keep the original alive so that its id() is not reused

    def __call__(self, value: Any) -> Any:
        """Return the copy of a module or a batch.

        Raises:
            UncopyableError: There is a ScriptModule, DDP or FSDP in it, or ``tensor`` says so.
        """
        if id(value) in self._made:
            return self._made[id(value)][1]
        if isinstance(value, Tensor):
            made = self._tensor(value).requires_grad_(value.requires_grad)
            is_parameter = isinstance(value, nn.Parameter)
            return self._keep(value, nn.Parameter(made, value.requires_grad) if is_parameter else made)
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, torch.device):
            return self._device or value
        if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
            return types.MethodType(value.__func__, self(value.__self__))
        return self._container(value)

    def _keep(self, original: Any, made: Any) -> Any:
        self._made[id(original)] = original, made
        return made

    def _module(self, module: nn.Module) -> nn.Module:
        if isinstance(module, torch.jit.ScriptModule) or type(module).__name__ in _UNCOPYABLE:
            raise UncopyableError(f"a {type(module).__name__} cannot be copied")
        clone: nn.Module = self._keep(module, object.__new__(type(module)))
        # A parametrized module refuses to be pickled.
        state = dict(vars(module)) if is_parametrized(module) else module.__getstate__()
        # Without its compiled call the copy runs eagerly.
        clone.__setstate__({key: self(value) for key, value in state.items() if key != COMPILED_CALL.name})
        for name in _HOOKS:
            clone.__dict__[name] = OrderedDict()
        return clone

    def _container(self, value: Any) -> Any:
        # Exact types only: a subclass may refuse writes. Kept before they are filled, since they may contain
        # themselves.
        if type(value) in (dict, OrderedDict, defaultdict) or isinstance(value, UserDict):
            made = self._keep(value, copy.copy(value))
            made.update((key, self(value[key])) for key in value)
        elif type(value) in (list, deque):
            made = self._keep(value, copy.copy(value))
            made.clear()
            made.extend(map(self, value))
        elif isinstance(value, tuple) and (type(value) is tuple or hasattr(value, "_make")):
            made = getattr(value, "_make", tuple)(map(self, value))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            made = self._keep(value, copy.copy(value))
            for field in dataclasses.fields(value):
                object.__setattr__(made, field.name, self(getattr(value, field.name)))  # frozen ones too
        elif type(value) in _GENERATORS:
            made = self._keep(value, copy.deepcopy(value))
        else:
            made = value
        return made


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Within this context steps of a copy of ``module`` run eagerly; random states and stdout stay as they are."""
    cuda = sorted({p.device.index for p in module.parameters() if p.device.type == "cuda"})
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(redirect_stdout(io.StringIO()))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def seed() -> None:
    """Seed all of the process's random generators, so that two steps draw the same numbers."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
