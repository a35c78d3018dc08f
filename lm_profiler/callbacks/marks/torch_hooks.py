"""What is put into torch for a run, and taken out after it: two hooks of all optimizers, and replaced functions.

torch calls all of it within the program's own steps, so a caller must not add or remove hooks while torch goes through
them, must return at once while ``torch.compile`` traces it, and must leave other threads alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, nullcontext
from functools import update_wrapper
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import dataloader

from lm_profiler.measure.boundary import UNGUARDED, Guard

Function = Callable[..., Any]
OptimizerHook = Callable[[Any], object]  # gets the optimizer


class SharedOptimizerHooks:
    """One pair of hooks of all optimizers of this process, which calls ``step_begins`` and ``step_ends`` of one loop.

    torch goes through the hooks themselves: to add or remove one within a hook would raise "OrderedDict mutated during
    iteration" in the program's ``optimizer.step()``. So there is one pair, which stays in torch if ``detach`` is called
    within a hook, and then calls nothing.
    """

    def __init__(self) -> None:
        self.step_begins: OptimizerHook | None = None
        self.step_ends: OptimizerHook | None = None
        self._guard: Guard = UNGUARDED  # of those two
        # whether whoever attaches next may take the hooks over
        self.is_provisional = False
        self._handles: list[Any] = []
        self.is_in_hook = False  # whether torch is amid the hooks of an optimizer

    @property
    def is_taken(self) -> bool:
        """Whether somebody profiles a loop of this process already, or waits for one."""
        return self.step_begins is not None and not self.is_provisional

    def attach_provisionally(self, step_begins: OptimizerHook) -> None:
        """Call ``step_begins`` if no other loop has the hooks, until another one attaches them."""
        if self.step_begins is None:
            self.attach(step_begins)
            self.is_provisional = True

    def attach(
        self,
        step_begins: OptimizerHook,
        step_ends: OptimizerHook | None = None,
        guard: Guard = UNGUARDED,
    ) -> None:
        """Call both functions at each step from now on. ``guard`` guards both hooks, unless they guard themselves."""
        self._guard = guard
        self.step_begins = step_begins
        self.step_ends = step_ends
        self.is_provisional = False
        if not self._handles:
            self._handles = [
                register_optimizer_step_pre_hook(self._pass_begin),
                register_optimizer_step_post_hook(self._pass_end),
            ]

    def detach(self) -> None:
        """Call nothing more; call this again outside of optimizers to remove the hooks too."""
        self.is_provisional = False
        self.step_begins = None
        self.step_ends = None
        if self.is_in_hook:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _pass_begin(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._call(self.step_begins, optimizer)

    def _pass_end(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._call(self.step_ends, optimizer)

    def _call(self, hook: OptimizerHook | None, optimizer: Any) -> None:
        """Call ``hook`` with the optimizer, guarded; nothing if there is none."""
        if hook is None:
            return
        self.is_in_hook = True
        try:
            hook(optimizer)
        except BaseException as error:
            self._guard.handle(error)
        finally:
            self.is_in_hook = False


OPTIMIZER_HOOKS = SharedOptimizerHooks()


class ModuleHook:
    """A hook of a module, guarded by ``guard``. A copy or a pickle of the module gets one that does nothing."""

    def __init__(self, call: Callable[..., object], guard: Guard) -> None:
        self._call = call
        self._guard = guard

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        try:
            self._call(*args)
        except BaseException as error:
            self._guard.handle(error)

    def __reduce__(self) -> Any:
        # A bound method of the standard library that takes any arguments and returns None.
        return getattr, (nullcontext(), "__exit__")


class Replacements:
    """Functions that stand in for others until ``undo``. What somebody else has replaced since then stays."""

    def __init__(self) -> None:
        self._undo = ExitStack()

    def replace(
        self, owner: Any, name: str, wrap: Callable[[Function], Function]
    ) -> None:
        """Put what ``wrap`` returns for the function in its place: an attribute of a module, or a method of a class."""
        original = vars(owner)[name]
        wrapper = update_wrapper(wrap(original), original)
        setattr(owner, name, wrapper)
        self._undo.callback(_put_back, owner, name, original, wrapper)

    def replace_everywhere(
        self, wraps: Mapping[Function, Callable[[Function], Function]]
    ) -> None:
        """Replace functions, each by what its ``wrap`` returns, also in modules that have imported them by name."""
        wrap_by_id = {id(original): wrap for original, wrap in wraps.items()}
        for module in list(sys.modules.values()):
            names = dict(getattr(module, "__dict__", {}))
            for name, value in names.items():
                if id(value) in wrap_by_id:
                    self.replace(module, name, wrap_by_id[id(value)])

    def undo(self) -> None:
        self._undo.close()


def _put_back(owner: Any, name: str, original: Function, wrapper: Function) -> None:
    if vars(owner).get(name) is wrapper:
        setattr(owner, name, original)


def loader_iterators() -> list[type]:
    """Return the classes of torch's iterators over a ``DataLoader`` that fetch a batch, and those derived from them."""
    classes: list[type] = []
    for value in vars(dataloader).values():
        if isinstance(value, type) and value.__module__ == dataloader.__name__:
            classes += [value, *subclasses(value)]
    return [kind for kind in dict.fromkeys(classes) if "__next__" in vars(kind)]


def subclasses(kind: type) -> list[type]:
    """Return all classes that are derived from ``kind``."""
    classes: list[type] = []
    derived: type
    for derived in type.__subclasses__(kind):
        classes.append(derived)
        classes += subclasses(derived)
    return classes


def clipping_functions() -> list[Function]:
    """Return the functions of torch that clip gradients."""
    utils = torch.nn.utils
    return [
        utils.clip_grad_norm_,
        utils.clip_grad_value_,
        utils.get_total_norm,
        utils.clip_grads_with_norm_,
    ]


def clearing_classes(objects: Collection[object]) -> list[type]:
    """Return the classes that clear gradients: torch's own, and those of ``objects`` that do it themselves."""
    classes: list[type] = [torch.optim.Optimizer, torch.nn.Module]
    for instance in objects:
        classes += [
            kind for kind in type(instance).__mro__ if "zero_grad" in vars(kind)
        ]
    return list(dict.fromkeys(classes))
