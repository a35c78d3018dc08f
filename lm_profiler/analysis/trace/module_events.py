"""Names modules by the profiler's own events of them, which it writes if it records stacks: ``nn.Module: Attention_3``.

Such an event has the module's class and a number, but no path. The classes of the modules around it make up the path.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

_PREFIX = "nn.Module: "
_NUMBER = re.compile(r"_\d+\Z")


def is_module_event(name: str) -> bool:
    """Return whether an event of this ``name`` is one of a module."""
    return name.startswith(_PREFIX)


def nested_names(spans: Sequence[Sequence[int]], names: Sequence[str]) -> Iterator[str]:
    """Yield the path and the class of the module of each event, such as ``GPT.Block.Attention (Attention)``.

    Args:
        spans: start, length and thread of each event, ordered by start, and of equal starts the longest first.
        names: the names of the events.
    """
    # by thread: end and path of the modules that contain the present moment, the innermost last
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
