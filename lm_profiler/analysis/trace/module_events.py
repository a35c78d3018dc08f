"""The profiler's own events of modules, which it writes where it records stacks: ``nn.Module: Attention_3``.

An event has a module's class and a number, and no path: the path is the classes of the modules around it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

_PREFIX = "nn.Module: "
_NUMBER = re.compile(r"_\d+\Z")


def is_module_event(name: str) -> bool:
    """Return whether ``name`` is that of an event of a module."""
    return name.startswith(_PREFIX)


def nested_names(spans: Sequence[Sequence[int]], names: Sequence[str]) -> Iterator[str]:
    """Yield the path and the class of each event, such as ``GPT.Block.Attention (Attention)``.

    ``spans`` holds start, length and thread of each, by the start and the longest first; ``names`` are those of events.
    """
    # end and path, by thread
    open_modules: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
    for (start, length, thread), name in zip(spans, names, strict=True):
        stack = open_modules[thread]
        while stack and stack[-1][0] <= start:
            stack.pop()
        type_name = _NUMBER.sub("", name.removeprefix(_PREFIX))
        path = type_name
        if stack:
            path = f"{stack[-1][1]}.{type_name}"
        stack.append((start + length, path))
        yield f"{path} ({type_name})"
