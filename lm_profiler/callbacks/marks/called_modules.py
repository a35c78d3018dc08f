"""Marks the calls of a loop's modules, and finds the parts and methods that a program calls instead of its model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import CodeType
from typing import Any

from torch import nn

from lm_profiler.callbacks.marks.model_methods import (
    ModelMethod,
    marked_method,
    methods_of,
    running_methods,
)
from lm_profiler.callbacks.marks.torch_hooks import ModuleHook, Replacements
from lm_profiler.measure.boundary import Guard
from lm_profiler.measure.counts.recompiles import is_compiled, is_wrapped_by_compiler

# The children of modules whose calls are not seen are observed, down to this depth.
_MOST_LEVELS = 3
# For this many steps after that, the methods are searched by which the program calls the model.
_SEARCH_STEPS = 8


class CalledModules:
    """The modules and methods of a loop whose calls are marked, until ``stop``.

    At first they are the modules that ``observe`` is given. If the program does not call these as ``module(batch)``,
    ``observe_children`` also marks their children and their ``forward``, and a search for their other methods begins.

    The search: ``note_call`` keeps which methods of the modules are running at each marked call. At the next backward
    pass, ``mark_methods_of_calls`` marks the methods that ran these forward passes.

    Args:
        begin_call: called with the module and the arguments of each marked call.
        end_call: called with the module, the arguments and the output of each marked call.
        guard: guards both.
        replacements: takes the methods that are replaced; whoever made it undoes them.
    """

    def __init__(
        self,
        begin_call: Callable[..., object],
        end_call: Callable[..., object],
        guard: Guard,
        replacements: Replacements,
    ) -> None:
        self._begin_call = begin_call
        self._end_call = end_call
        self._guard = guard
        self._replacements = replacements
        self._undo = ExitStack()  # stops observing the modules
        self._innermost_observed: list[nn.Module] = []
        self._levels_left = _MOST_LEVELS
        # the modules that the program does not call as ``module(batch)``
        self._uncalled_modules: list[nn.Module] = []
        # the methods of the uncalled modules, by the code that each runs
        self._methods: dict[CodeType, ModelMethod] = {}
        self._marked_methods: set[ModelMethod] = set()
        # the steps in which methods are still searched; 0 while there is no search
        self.search_steps_left = 0
        # for each marked call since the last backward pass in the search: the methods of the uncalled modules that were
        # running, the innermost first
        self.methods_of_calls: set[tuple[ModelMethod, ...]] = set()

    def observe(self, modules: Sequence[nn.Module]) -> None:
        """Mark the calls of ``modules``; a module that was compiled in place is left out."""
        self._innermost_observed = [*modules, *self._innermost_observed]
        for module in modules:
            # A module compiled in place would be compiled again with the hooks, and then not call them.
            if is_compiled(module) and not is_wrapped_by_compiler(module):
                continue
            begins = module.register_forward_pre_hook(
                ModuleHook(self._begin_call, self._guard),
                prepend=True,
                with_kwargs=True,
            )
            self._undo.callback(begins.remove)
            ends = module.register_forward_hook(
                ModuleHook(self._end_call, self._guard), always_call=True
            )
            self._undo.callback(ends.remove)

    def stop(self) -> None:
        """Stop observing the modules; methods stay replaced until the ``replacements`` are undone."""
        self._undo.close()

    def observe_children(self) -> None:
        """Mark the calls of the children of the observed modules, because the program does not call these modules.

        Mark ``forward``, too, which the program may call directly, and begin to search for other methods. Do nothing if
        the children of ``_MOST_LEVELS`` levels are observed already.
        """
        if self._levels_left == 0:
            return
        self._levels_left -= 1
        parents = self._innermost_observed
        self._innermost_observed = []
        children: list[nn.Module] = []
        for module in parents:
            if is_compiled(module):
                continue
            children += module.children()
            self._uncalled_modules.append(module)
            methods = methods_of(module)
            self._methods.update(methods)
            for method in methods.values():
                if method.name == "forward":
                    self._mark_method(method)
        self.observe(children)
        self.search_steps_left = _SEARCH_STEPS

    def _mark_method(self, method: ModelMethod) -> None:
        """Mark ``method``, which the program calls instead of the module: each call counts as a call of the module."""
        if method not in self._marked_methods:
            self._marked_methods.add(method)
            begins = self._guard.wrap(self._begin_method)
            ends = self._guard.wrap(self._end_call)
            mark = partial(marked_method, begins=begins, ends=ends)
            self._replacements.replace(method.owner, method.name, mark)

    def _begin_method(self, module: Any, args: Any, kwargs: Any) -> bool:
        """Begin the call of a marked method; return whether it is marked, as it is if ``module`` is an uncalled one.

        It is not marked for other modules of the same class.
        """
        if not any(module is uncalled for uncalled in self._uncalled_modules):
            return False
        self._begin_call(module, args, kwargs)
        return True

    def note_call(self) -> None:
        """Keep which methods are running at this marked call, for ``mark_methods_of_calls``."""
        self.methods_of_calls.add(running_methods(self._methods))

    def mark_methods_of_calls(self) -> None:
        """Mark the methods by which the program ran the forward passes since the last backward pass.

        For each marked call, this is the outermost method that was running then and is no longer running. A method that
        also runs this backward pass, such as one for a whole training step or epoch, is no forward pass.
        """
        methods_of_calls = self.methods_of_calls
        self.methods_of_calls = set()
        around_backward = running_methods(self._methods)
        for methods in methods_of_calls:
            forward_methods = [
                method for method in methods if method not in around_backward
            ]
            if forward_methods:
                self._mark_method(forward_methods[-1])

    def end_search_step(self) -> None:
        """Note that a step of the search has ended."""
        self.search_steps_left -= 1
        self.methods_of_calls.clear()
