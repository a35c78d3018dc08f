"""Finds the module and the line of code for which an operator runs, in forward and in backward."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lm_profiler.measure.counts.syncs import user_line
from lm_profiler.measure.memory.storage_notes import Site
from lm_profiler.record.text import short_path
from lm_profiler.torch_names import BACKWARD_NODE, NEXT_NODE_NUMBER, NODE_NUMBER


class CallSites:
    """Returns the ``Site`` of an operator when called with it, below the dispatcher's autograd.

    An operator of backward has the module and the line of the forward operator whose derivative it computes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._paths = {child: path for path, child in module.named_modules() if path}
        self._running: list[nn.Module] = []
        self._of_node: dict[int, Site] = {}
        self._hooks = ExitStack()
        self._hooks.enter_context(register_module_forward_pre_hook(self._opened))
        self._hooks.enter_context(register_module_forward_hook(self._closed, always_call=True))
        self._node, self._next = BACKWARD_NODE.find_or(lambda: None), NEXT_NODE_NUMBER.find_or(lambda: 0)

    def __call__(self, func: Any) -> Site:
        node, module = self._node(), self._paths.get(self._running[-1]) if self._running else None
        if node is not None and not self._running:
            forward = self._of_node.get(NODE_NUMBER.of_or(node, lambda: -1)(), Site())
            return forward._replace(operator=str(func), recomputes=False)
        own_line = user_line(sys._getframe(2))
        line = None if own_line is None else f"{short_path(own_line[0])}:{own_line[1]}"
        site = Site(str(func), module, line, recomputes=node is not None)
        # Autograd makes an operator's node, and gives it its number, before the operator runs.
        self._of_node[self._next() - 1] = site
        return site

    def stop(self) -> None:
        """Hear of no further modules."""
        self._hooks.close()

    def _opened(self, module: nn.Module, args: Any) -> None:
        self._running.append(module)

    def _closed(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._running:  # empty where the step began amid this forward
            self._running.pop()
