"""Adds hooks to torch for a run, and removes them after it: two hooks of all optimizers, and replaced functions.

torch calls them within the program's own steps. So nothing may add or remove hooks while torch iterates over them, and
each must return at once in other threads and while ``torch.compile`` traces it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, nullcontext
from functools import update_wrapper
from types import FrameType
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

    torch iterates over the hooks themselves, so that adding or removing one within a hook would raise "OrderedDict
    mutated during iteration" in the program's ``optimizer.step()``. So there is only one pair. If ``detach`` is called
    within a hook, the pair stays in torch and calls nothing.
    """

    def __init__(self) -> None:
        self.step_begins: OptimizerHook | None = None
        self.step_ends: OptimizerHook | None = None
        self._guard: Guard = UNGUARDED  # guards these two
        # whether the next call of ``attach`` may replace these two
        self.is_provisional = False
        self._handles: list[Any] = []
        self.is_in_hook = False  # whether torch is calling the hooks of an optimizer

    @property
    def is_taken(self) -> bool:
        """Whether a loop of this process is profiled already, or its profiler waits for it to begin."""
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
        """Stop calling the functions, and remove the hooks; within a hook they stay until this is called again."""
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


def is_within_optimizer_step() -> bool:
    """Return whether this function is called from within an ``optimizer.step()``, such as in one of its hooks."""
    file_of_optimizer = sys.modules[torch.optim.Optimizer.__module__].__file__
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        # The function with which torch wraps the ``step`` of every optimizer, and which calls the hooks.
        is_step = code.co_name == "wrapper" and code.co_filename == file_of_optimizer
        if is_step:
            return True
        frame = frame.f_back
    return False


class ModuleHook:
    """A hook of a module, guarded by ``guard``. A copy or a pickle of the module gets one that does nothing."""

    def __init__(self, call: Callable[..., object], guard: Guard) -> None:
        self._call = call
        self._guard = guard

    def __call__(self, *args: Any) -> None:
        """Call the function of the hook, unless torch.compile only traces it; no error of ours reaches training."""
        if torch.compiler.is_compiling():
            return
        try:
            self._call(*args)
        except BaseException as error:
            self._guard.handle(error)

    def __reduce__(self) -> Any:
        # the copy is a bound method of the standard library that takes any arguments and returns None
        return getattr, (nullcontext(), "__exit__")


class Replacements:
    """Replaces functions until ``undo``, which leaves alone what other code has replaced in the meantime."""

    def __init__(self) -> None:
        self._undo = ExitStack()

    def replace(
        self, owner: Any, name: str, wrap: Callable[[Function], Function]
    ) -> None:
        """Replace the attribute ``name`` of a module, or a method of a class, by what ``wrap`` returns for it."""
        original = vars(owner)[name]
        wrapper = update_wrapper(wrap(original), original)
        setattr(owner, name, wrapper)
        self._undo.callback(_restore, owner, name, original, wrapper)

    def replace_everywhere(
        self, wrap_by_function: Mapping[Function, Callable[[Function], Function]]
    ) -> None:
        """Replace functions in all modules that have imported them by name.

        ``wrap_by_function`` maps each function to what makes its replacement. The module that defines a function keeps
        it: pickle looks there for functions that the program stored before.
        """
        # by identity, because other values in modules may not be hashable
        wrap_by_id = {id(original): wrap for original, wrap in wrap_by_function.items()}
        for module_name, module in list(sys.modules.items()):
            attributes = dict(getattr(module, "__dict__", {}))
            for name, value in attributes.items():
                wrap = wrap_by_id.get(id(value))
                if wrap is None:
                    continue
                # A partial or another object that a program has put there has neither.
                defined_in = getattr(value, "__module__", None)
                defined_as = getattr(value, "__qualname__", None)
                is_defined_here = (defined_in, defined_as) == (module_name, name)
                if not is_defined_here:
                    self.replace(module, name, wrap)

    def undo(self) -> None:
        self._undo.close()


def _restore(owner: Any, name: str, original: Function, wrapper: Function) -> None:
    was_replaced_again = vars(owner).get(name) is not wrapper
    if not was_replaced_again:
        setattr(owner, name, original)


def loader_iterators() -> list[type]:
    """Return the classes of iterators over a ``DataLoader`` that fetch a batch: those of torch, and subclasses."""
    classes: dict[type, None] = {}  # a dict keeps their order
    for value in vars(dataloader).values():
        is_own_class = (
            isinstance(value, type) and value.__module__ == dataloader.__name__
        )
        if is_own_class:
            classes.update(dict.fromkeys([value, *subclasses(value)]))
    return [kind for kind in classes if "__next__" in vars(kind)]


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
    """Return the classes that define ``zero_grad``: torch's own, and the classes of ``objects``."""
    classes: list[type] = [torch.optim.Optimizer, torch.nn.Module]
    for instance in objects:
        classes += [
            kind for kind in type(instance).__mro__ if "zero_grad" in vars(kind)
        ]
    return list(dict.fromkeys(classes))
