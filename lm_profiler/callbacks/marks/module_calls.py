"""Observes the calls of chosen modules, and leaves nothing in these modules.

A hook (``register_forward_hook``) would be an attribute of the module. TorchScript compiles the hooks of a module or
refuses it, a program may count or clear them, and copies and pickles contain them.

torch calls a module in place of its ``forward`` by its attribute ``_compiled_call_impl``, if that is not None. During
the observation the *class* of an observed module has a descriptor of this name. Its value is None for all other modules
of the class. A module that was compiled in place has an attribute of its own, which has priority.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

from torch import nn
from torch.compiler import is_compiling
from torch.jit import is_tracing  # type: ignore[attr-defined]  # public, not in __all__

from lm_profiler.measure.boundary import Guard
from lm_profiler.measure.uncompiled import keep_uncompiled
from lm_profiler.torch_names import CALL, COMPILED_CALL

# receives the module, and the positional and named arguments of its call
CallBegins = Callable[[Any, Sequence[Any], Mapping[str, Any]], object]
# receives the module, the positional arguments of its call, and the output; None if the call raised
CallEnds = Callable[[Any, Sequence[Any], Any], object]


class _Observer(NamedTuple):
    """What is called at each call of a module."""

    begins: CallBegins
    ends: CallEnds
    guard: Guard  # guards both


class _ObservedModule:
    """A module with observers; torch calls this object in place of the module."""

    def __init__(self, module: nn.Module) -> None:
        # Kept alive, because ``ModuleCalls`` finds this object by the identity of the module.
        self._module = module
        self._call: Callable[..., Any] = CALL.get(module)
        self.observers: tuple[_Observer, ...] = ()  # the outermost first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, and the observers around it, unless the call is only compiled or traced."""
        if is_compiling() or is_tracing():
            return self._call(*args, **kwargs)
        observers = self.observers
        self._begin_call(observers, args, kwargs)
        try:
            output = self._call(*args, **kwargs)
        except BaseException:
            self._end_call(observers, args, None)
            raise
        self._end_call(observers, args, output)
        return output

    def _begin_call(
        self,
        observers: Sequence[_Observer],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        for observer in observers:
            try:
                observer.begins(self._module, args, kwargs)
            except BaseException as error:
                observer.guard.handle(error)

    def _end_call(
        self, observers: Sequence[_Observer], args: Sequence[Any], output: Any
    ) -> None:
        """Call those ``observers`` that saw the call begin, in the opposite order."""
        for observer in reversed(observers):
            try:
                observer.ends(self._module, args, output)
            except BaseException as error:
                observer.guard.handle(error)


class ModuleCalls:
    """The descriptor in the classes of observed modules."""

    def __init__(self) -> None:
        self._observed: dict[int, _ObservedModule] = {}  # by identity of the module
        # the number of observers of each class that has the descriptor
        self._observers_by_class: Counter[type[nn.Module]] = Counter()

    def __get__(
        self, module: nn.Module | None, module_class: Any = None
    ) -> _ObservedModule | None:
        """Return what torch calls in place of ``module``; None if it is not observed, or only compiled."""
        if is_compiling():
            return None
        return self._observed.get(id(module))

    def __reduce__(self) -> Any:
        # cloudpickle copies classes of ``__main__`` by value: the copy has None, as all modules have by default
        return type(None), ()

    def observe(
        self, module: nn.Module, begins: CallBegins, ends: CallEnds, guard: Guard
    ) -> Callable[[], None]:
        """Call ``begins`` and ``ends`` around each call of ``module``; return what stops that.

        A later observer is called around the earlier ones, and all of them around the hooks of the program. If the
        observation stops while the module runs, ``ends`` is still called for that call.

        Raises NameMissing if this torch does not call a module in this way.
        """
        COMPILED_CALL.get(nn.Module)
        _keep_uncompiled()
        observed = self._observed.get(id(module)) or _ObservedModule(module)
        self._observed[id(module)] = observed
        module_class = type(module)
        self._observers_by_class[module_class] += 1
        if vars(module_class).get(COMPILED_CALL.name) is None:
            setattr(module_class, COMPILED_CALL.name, self)
        observer = _Observer(begins, ends, guard)
        observed.observers = (observer, *observed.observers)
        return partial(self._stop, module, module_class, observer)

    def _stop(
        self, module: nn.Module, module_class: type[nn.Module], observer: _Observer
    ) -> None:
        """Remove ``observer``; with the last one of a class, remove the descriptor."""
        observed = self._observed[id(module)]
        observed.observers = tuple(
            other for other in observed.observers if other is not observer
        )
        if not observed.observers:
            del self._observed[id(module)]
        self._observers_by_class[module_class] -= 1
        if self._observers_by_class[module_class] == 0:
            self._leave_class(module_class)

    def _leave_class(self, module_class: type[nn.Module]) -> None:
        """Make the class look up the attribute in ``nn.Module`` again, where it is None."""
        # None if cloudpickle has loaded a copy of the class in this process: it sets the attributes of the same class.
        value = vars(module_class).get(COMPILED_CALL.name)
        is_replaced = value is not None and value is not self
        if is_replaced:
            return
        if module_class is nn.Module:
            setattr(module_class, COMPILED_CALL.name, None)
        elif COMPILED_CALL.name in vars(module_class):
            delattr(module_class, COMPILED_CALL.name)


MODULE_CALLS = ModuleCalls()


@cache
def _keep_uncompiled() -> None:
    """Keep torch.compile from what runs here between a compiled module and the plain one that it calls."""
    keep_uncompiled(ModuleCalls.__get__)
    keep_uncompiled(_ObservedModule.__call__, with_callees=False)
    keep_uncompiled(_ObservedModule._begin_call)
    keep_uncompiled(_ObservedModule._end_call)
