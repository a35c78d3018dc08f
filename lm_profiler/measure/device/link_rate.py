"""How fast the ranks of a machine exchange data: collectives of torch.distributed, timed on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lm_profiler.measure.clocks.stream import Stopwatch
from lm_profiler.measure.memory.peaks import available_bytes

_BYTES = 4  # float32
# torch 2.13 has renamed both, and warns of the old names.
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_FEWEST = 6  # the interval of a median needs six times
_TIMEOUT = timedelta(minutes=1)  # if a rank hangs, collectives of the others end in an error that names it


@dataclass(frozen=True)
class LinkRequest:
    """What each rank measures: every one of ``ops`` at every one of ``sizes_bytes``."""

    backend: str  # gloo (on the CPU) or nccl (rank r on GPU r)
    ranks: int  # how many there are
    port: int  # of the store, on this machine
    name: str  # distinguishes these ranks from others that use the store
    ops: Sequence[str]
    sizes_bytes: Sequence[int]
    repeats: int  # the most repeats of a row
    budget_s: float  # the seconds that a row may take; six repeats are made in any case


class LinkRow(NamedTuple):
    """``seconds`` of each repeat, on the rank that took longest; ``unknown`` says why there are none."""

    op: str
    size_bytes: int
    seconds: tuple[float, ...] = ()
    unknown: str | None = None


def time_links(asked: LinkRequest, rank: int, send: Callable[[LinkRow], object]) -> None:
    """Measure as one of ``asked.ranks`` ranks; rank 0 sends each row as soon as it is known.

    Raises RuntimeError where a collective gives a wrong result, or another rank is gone.
    """
    device = torch.device("cuda", rank) if asked.backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    server = dist.TCPStore("localhost", asked.port, is_master=False)  # type: ignore[attr-defined]  # the stubs lack it
    store = dist.PrefixStore(asked.name, server)  # type: ignore[attr-defined]  # as above
    dist.init_process_group(asked.backend, store=store, rank=rank, world_size=asked.ranks, timeout=_TIMEOUT)
    for op in asked.ops:
        for size_bytes in asked.sizes_bytes:
            row = _row(asked, op, size_bytes, device, rank)
            if rank == 0:
                send(row)


def _row(asked: LinkRequest, op: str, size_bytes: int, device: torch.device, rank: int) -> LinkRow:
    # All tensors have whole parts for the ranks, as those of nccl-tests.
    part = max(size_bytes // _BYTES // asked.ranks, 1)
    size_bytes = part * asked.ranks * _BYTES
    available = available_bytes(device)
    needed = 2 * size_bytes * (asked.ranks if device.type == "cpu" else 1)
    if _most(float(available is not None and needed > available), device):
        return LinkRow(op, size_bytes, unknown="the tensors do not fit into the memory that is free")
    call, is_right = _collective(op, part, asked.ranks, rank, device)
    try:
        call()
    except RuntimeError as error:  # gloo lacks some
        dist.barrier()  # raises again if a rank is gone, which is not a missing operation
        return LinkRow(op, size_bytes, unknown=str(error).splitlines()[0][:100])
    if not is_right():
        raise RuntimeError(f"{op} of {size_bytes} bytes: wrong result")
    return LinkRow(op, size_bytes, tuple(_times(asked, call, device)))


def _times(asked: LinkRequest, call: Callable[[], object], device: torch.device) -> Iterator[float]:
    watch = Stopwatch(device)

    def once() -> float:
        dist.barrier()
        return watch(call)

    once_s = _most(once(), device)  # a second warm-up, which shows how many repeats fit into the budget
    repeats = max(min(asked.repeats, int(asked.budget_s / max(once_s, 1e-9))), _FEWEST)
    seconds = torch.tensor([once() for _ in range(repeats)], dtype=torch.float64, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    yield from seconds.tolist()


def _most(value: float, device: torch.device) -> float:
    most = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def _collective(
    op: str, part: int, ranks: int, rank: int, device: torch.device
) -> tuple[Callable[[], Any], Callable[[], bool]]:
    """Return a call of ``op`` over tensors of ``part`` · ``ranks`` elements, and whether its first result is right.

    Rank r has r + 1 everywhere; for reduce-scatter, times p + 1 in part p.
    """
    numbers = torch.arange(1.0, ranks + 1, device=device)
    own, total, whole = float(rank + 1), float(numbers.sum()), torch.empty(ranks, part, device=device)

    def equals(result: Tensor, expected: Tensor | float) -> bool:
        is_right = bool((result == expected).all())
        whole.zero_()  # sums of sums would soon be infinite
        return is_right

    if op == "all_gather":
        mine = torch.full((part,), own, device=device)
        return lambda: _GATHER(whole.view(-1), mine), lambda: equals(whole, numbers[:, None])
    if op == "reduce_scatter":
        whole.copy_((own * numbers)[:, None].expand_as(whole))
        mine = torch.empty(part, device=device)
        return lambda: _SCATTER(mine, whole.view(-1)), lambda: equals(mine, own * total)
    whole.fill_(own)
    if op == "broadcast":
        return lambda: dist.broadcast(whole, 0), lambda: equals(whole, 1.0)
    return lambda: dist.all_reduce(whole), lambda: equals(whole, total)
