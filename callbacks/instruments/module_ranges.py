"""Names each module's forward pass in a trace, which tells to which module a kernel belongs."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function

from lm_profiler.measure.boundary import UNGUARDED, Guard
from lm_profiler.measure.counts.recompiles import is_compiled

# matches what strategies and torch's wrappers insert into a module's path, such as ``_fsdp_wrapped_module.``
_WRAPPERS = re.compile(r"_[a-z]+_wrapped_module\.")


class _OpenRanges(threading.local):
    """The open ranges of each thread: the autograd engine recomputes checkpointed modules in a thread of its own."""

    def __init__(self) -> None:
        self.open: list[tuple[nn.Module, record_function]] = []


class ModuleRanges:
    """Opens a range ``module: <path> (<class>)`` around every forward pass below ``module``.

    Compiled modules, and what is inside them, are left alone: a hook would have them compiled again.
    """

    def __init__(self, part: Guard = UNGUARDED) -> None:
        self._part = part
        self._hooks = ExitStack()
        self._threads = _OpenRanges()

    def attach(self, module: nn.Module) -> None:
        """Open ranges around the forward passes below ``module``, until ``detach``."""
        closed = self._part.guard(self._close)
        for path, child in _callable_below(module):
            name = f"module: {path} ({type(child).__name__})"
            opened = self._part.guard(partial(self._open, name))
            # Before and after every hook of the user's; `always_call` closes the range when forward raises.
            self._hooks.enter_context(child.register_forward_pre_hook(opened, prepend=True))
            self._hooks.enter_context(child.register_forward_hook(closed, always_call=True))

    def detach(self) -> None:
        """Leave the modules as they were."""
        self._hooks.close()
        for _, range_ in reversed(self._threads.open):
            range_.__exit__(None, None, None)
        self._threads.open.clear()

    def _open(self, name: str, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        range_ = record_function(name)
        range_.__enter__()
        self._threads.open.append((module, range_))

    def _close(self, module: nn.Module, args: Any, output: Any) -> None:
        stack = self._threads.open
        if torch.compiler.is_compiling() or not any(opened is module for opened, _ in stack):
            return
        opened = None
        while opened is not module:  # Ctrl-C may have left inner ranges open
            opened, range_ = stack.pop()
            range_.__exit__(None, None, None)


def _callable_below(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of all modules below ``module`` that have a forward pass of their own, each once."""
    left_alone = {inside for part in module.modules() if is_compiled(part) for inside in part.modules()}
    for path, part in module.named_modules(memo=left_alone):
        # A ModuleList, for one, is never called.
        if path and type(part).forward is not nn.Module.forward:
            yield _WRAPPERS.sub("", path), part
