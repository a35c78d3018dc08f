"""The bytes that a rank's collectives would put on its link, as torch's fake process group is asked for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lm_profiler.measure.clocks.steps import OUTSIDE
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.record.parts import PARTS
from lm_profiler.torch_names import DISPATCH_MODE, WORLD, tree_leaves

# how often a ring of n ranks passes (n-1)/n of all bytes on, by a part of the collective's name
_TURNS = {"reduce_scatter": 1, "allreduce": 2, "all_reduce": 2, "gather": 1, "alltoall": 1, "all_to_all": 1}

_FROM_ONE = ("broadcast", "reduce_")  # collectives whose bytes pass each link once


def ring_bytes(name: str, size_bytes: int, ranks: int) -> int:
    """Return the bytes that each of ``ranks`` sends in the collective ``name`` of ``size_bytes``; 0 for a barrier.

    The size is the gathered, or not yet scattered, one. The factors are those of nccl-tests' "bus bandwidth"
    (doc/PERFORMANCE.md): no algorithm over point-to-point links sends less, reduction in a switch aside.
    """
    turns = next((n for part, n in _TURNS.items() if part in name), None)
    if turns is not None:
        return turns * size_bytes * (ranks - 1) // ranks
    return size_bytes if ranks > 1 and any(part in name for part in _FROM_ONE) else 0


class LinkBytes(DISPATCH_MODE.as_base()):  # type: ignore[misc]  # a class that is looked up at run time
    """Counts what collectives send, in ``by_phase``, as long as it is entered."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self._timeline = timeline
        self.by_phase: Counter[str] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # so that torch does not import its compiler to keep it away

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented  # the DTensor takes the call apart, and its collectives come here one by one
        made = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional"):
            self._add(str(func), [*args, made])
        return made

    def _add(self, name: str, given: list[Any]) -> None:
        code = self._timeline.stack[-1]
        if code < OUTSIDE:
            sizes = (sum(leaf.nbytes for leaf in tree_leaves(each) if isinstance(leaf, Tensor)) for each in given)
            self.by_phase[PARTS[code]] += ring_bytes(name, max(sizes), _ranks_among(given))


def _ranks_among(given: list[Any]) -> int:
    """Return the size of the process group among a collective's arguments: an object of C++, or a name."""
    groups = {name: group for group, name in WORLD.find().pg_names.items()}
    for each in given:
        if isinstance(each, str) and each in groups:
            return int(groups[each].size())
        if isinstance(each, torch.ScriptObject):  # the group comes before how to reduce
            return int(dist.ProcessGroup.unbox(each).size())
    return dist.get_world_size()
