"""Measures how fast the ranks of a machine exchange data: collectives of torch.distributed, timed on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
_FEWEST_REPEATS = 6  # the confidence interval of a median needs six values
# If a rank hangs, collectives of the others end after this time in an error that names it.
_TIMEOUT = timedelta(minutes=1)


@dataclass(frozen=True)
class LinkRequest:
    """What the ranks measure: all ``ops`` at all ``sizes_bytes``."""

    backend: str  # gloo (on the CPU) or nccl (rank r on GPU r)
    ranks: int  # the number of ranks
    port: int  # the port of the store, on this machine
    name: str  # distinguishes these ranks from others that use the store
    ops: Sequence[str]
    sizes_bytes: Sequence[int]
    repeats: int  # the most repeats of a row
    budget_s: float  # the seconds that a row may take; six repeats are made in any case


class LinkRow(NamedTuple):
    """The measurements of one collective at one size."""

    op: str
    size_bytes: int
    seconds: tuple[float, ...] = ()  # the seconds of each repeat, on the slowest rank
    unknown: str | None = None  # the reason if the seconds are unknown


def time_links(
    request: LinkRequest, rank: int, send: Callable[[LinkRow], object]
) -> None:
    """Measure as one of ``request.ranks`` ranks; rank 0 sends each row as soon as it is known.

    Raises:
        RuntimeError: the result of a collective is wrong, or another rank has ended.
    """
    device = (
        torch.device("cuda", rank) if request.backend == "nccl" else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    server = dist.TCPStore("localhost", request.port, is_master=False)  # type: ignore[attr-defined]  # the stubs lack it
    store = dist.PrefixStore(request.name, server)  # type: ignore[attr-defined]  # as above
    dist.init_process_group(
        request.backend,
        store=store,
        rank=rank,
        world_size=request.ranks,
        timeout=_TIMEOUT,
    )
    for op in request.ops:
        for size_bytes in request.sizes_bytes:
            row = _measured_row(request, op, size_bytes, device, rank)
            if rank == 0:
                send(row)


def _measured_row(
    request: LinkRequest, op: str, wanted_bytes: int, device: torch.device, rank: int
) -> LinkRow:
    """Measure the collective ``op`` of about ``wanted_bytes``; return its seconds, or why they are unknown."""
    # All tensors can be divided among the ranks, as in nccl-tests: into parts with this number of elements.
    part = max(wanted_bytes // _BYTES // request.ranks, 1)
    size_bytes = part * request.ranks * _BYTES
    if _lacks_memory_on_a_rank(request, size_bytes, device):
        return LinkRow(
            op,
            size_bytes,
            unknown="the tensors do not fit into the free memory",
        )
    collective = _collective(op, part, request.ranks, rank, device)
    try:
        collective.call()
    except RuntimeError as error:
        # gloo lacks some operations. If another rank has ended instead, the barrier raises again.
        dist.barrier()
        return LinkRow(op, size_bytes, unknown=str(error).splitlines()[0][:100])
    if not collective.has_right_result():
        raise RuntimeError(f"{op} of {size_bytes} bytes: wrong result")
    return LinkRow(op, size_bytes, _slowest_seconds(request, collective.call, device))


def _lacks_memory_on_a_rank(
    request: LinkRequest, size_bytes: int, device: torch.device
) -> bool:
    """Return, on all ranks, whether the tensors do not fit into the memory of one of them."""
    available = available_bytes(device)
    needed = 2 * size_bytes
    if device.type == "cpu":  # all ranks share it
        needed *= request.ranks
    is_short = available is not None and needed > available
    return _maximum_over_ranks(float(is_short), device) > 0.0


def _slowest_seconds(
    request: LinkRequest, call: Callable[[], object], device: torch.device
) -> tuple[float, ...]:
    """Return the seconds of each repeat of ``call``, on the rank that took longest."""
    stopwatch = Stopwatch(device)

    def time_call() -> float:
        """Return the seconds of a call on this rank, which all ranks begin together."""
        dist.barrier()
        return stopwatch(call)

    # A second warm-up call, which shows how many repeats fit into the budget.
    warmup_s = _maximum_over_ranks(time_call(), device)
    affordable_repeats = int(request.budget_s / max(warmup_s, 1e-9))
    repeats = max(min(request.repeats, affordable_repeats), _FEWEST_REPEATS)
    own_seconds = [time_call() for _ in range(repeats)]
    seconds = torch.tensor(own_seconds, dtype=torch.float64, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return tuple(seconds.tolist())


def _maximum_over_ranks(value: float, device: torch.device) -> float:
    """Return, on all ranks, the largest ``value`` of any rank."""
    maximum = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(maximum, dist.ReduceOp.MAX)
    return maximum.item()


class _CheckedCall(NamedTuple):
    """A collective, and a check of its result."""

    call: Callable[[], Any]
    # to be called once, after the first call; it overwrites the tensors
    has_right_result: Callable[[], bool]


def _collective(
    op: str, part: int, ranks: int, rank: int, device: torch.device
) -> _CheckedCall:
    """Return ``op`` on tensors of ``part`` · ``ranks`` elements.

    All elements of rank r are r + 1; for reduce-scatter, those in part p are multiplied by p + 1.
    """
    rank_values = torch.arange(1.0, ranks + 1, device=device)
    own_value = float(rank + 1)
    sum_of_values = float(rank_values.sum())
    whole_tensor = torch.empty(ranks, part, device=device)

    def has_result(result: Tensor, expected: Tensor | float) -> bool:
        """Return whether all elements of ``result`` are as ``expected``, and clear the tensor that is exchanged."""
        is_right = bool((result == expected).all())
        whole_tensor.zero_()  # because repeated sums of sums would soon be infinite
        return is_right

    if op == "all_gather":
        own_part = torch.full((part,), own_value, device=device)
        return _CheckedCall(
            call=lambda: _GATHER(whole_tensor.view(-1), own_part),
            has_right_result=lambda: has_result(whole_tensor, rank_values[:, None]),
        )
    if op == "reduce_scatter":
        whole_tensor.copy_((own_value * rank_values)[:, None].expand_as(whole_tensor))
        own_part = torch.empty(part, device=device)
        return _CheckedCall(
            call=lambda: _SCATTER(own_part, whole_tensor.view(-1)),
            has_right_result=lambda: has_result(own_part, own_value * sum_of_values),
        )
    whole_tensor.fill_(own_value)
    if op == "broadcast":
        return _CheckedCall(
            call=lambda: dist.broadcast(whole_tensor, 0),
            has_right_result=lambda: has_result(whole_tensor, 1.0),
        )
    return _CheckedCall(
        call=lambda: dist.all_reduce(whole_tensor),
        has_right_result=lambda: has_result(whole_tensor, sum_of_values),
    )
