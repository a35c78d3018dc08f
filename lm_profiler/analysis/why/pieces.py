"""What ran in traced steps, piece by piece, and which part of the waterfall each piece's time is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from lm_profiler.analysis.trace.intervals import phase_at
from lm_profiler.analysis.trace.kinds import kernel_kind, operator_kind
from lm_profiler.analysis.trace.walk import Inputs, LaunchCall, Operator, Packed, walk
from lm_profiler.record.kernels import Kind

Use = Literal["products", "memory", "communication", "input", "dispatch"]
"""What a device's time is used for. ``dispatch``, on the CPU alone: an operator that only calls others."""

_RANKS: dict[Use, int] = {"products": 0, "memory": 1, "communication": 3, "input": 4, "dispatch": 5}
_UNKNOWN = 2  # of memory's: what is known by name goes first, for a compiled region may hold it

_CALLS_ONLY = re.compile(
    r"^(autograd|profiler|torch)::|^\w+Backward\d*$|^(detach|Optimizer\.)|^Torch|^AOTDispatcher|^Pregraph|^CompiledFunction|"
    r"^aten::(_?(unsafe_)?(view|reshape|split|chunk|unbind|expand|empty|new_empty|to|narrow|select|slice|squeeze|"
    r"unsqueeze|t|transpose|permute|detach|alias|flatten|unflatten|item|is_\w+|as_strided|resolve_(conj|neg)|result_type|"
    r"resize|set|lift_fresh|contiguous|movedim|diagonal|real|imag|numpy_T|unfold|size|stride|broadcast_to|swapaxes|"
    r"empty_like|empty_strided|new_empty_strided|expand_as|view_as|conj|view_as_(real|complex)|split_with_sizes)_?(_alias)?)$"
)
"""Operators that compute nothing: views, empty tensors, autograd's nodes, what surrounds compiled graphs."""

INPUT_PHASES = frozenset({"data", "transfer"})
"""What runs in these, or waits there, is due to the batch."""


class Piece(NamedTuple):
    """One kernel, or one call of an operator where the device is the CPU. None is unknown, or none.

    ``asked`` is when the host had asked for it. ``call`` tells the calls of ``operator`` apart: one may launch several
    kernels.
    """

    start: int
    end: int
    asked: int
    use: Use
    kind: Kind
    name: str
    operator: str | None
    module: str | None
    phase: str
    call: int
    inputs: Inputs | None


def launches_of(packed: Packed) -> list[LaunchCall]:
    """All calls of the driver, as they end; none where the device is the CPU."""
    return [event for event in walk(packed) if isinstance(event, LaunchCall)] if packed.has_device else []


def pieces_of(packed: Packed, calls: Sequence[LaunchCall], begin: int, end: int) -> Iterator[Piece]:
    """What was wanted between ``begin`` and ``end``: kernels, which ``calls`` launched, or operators of the CPU."""
    return _kernels(packed, calls, begin, end) if packed.has_device else _operators(packed, begin, end)


def _kernels(packed: Packed, calls: Sequence[LaunchCall], begin: int, end: int) -> Iterator[Piece]:
    """What was launched while the steps lasted. All of a replayed CUDA graph has the one launch of the graph."""
    launches = {call.correlation: call for call in calls}
    for start, length, name, correlation in packed.device():
        launch = launches.get(correlation) or LaunchCall(start, correlation, -1, -1)
        if not begin <= launch.start <= end:
            continue
        called, operator = packed.names[name] or "", packed.names[launch.operator]
        kind, phase = kernel_kind(called, operator), phase_at(packed.phases, launch.start)
        module, inputs = packed.names[launch.module], packed.inputs[launch.inputs]
        use, asked = _use(kind, phase), launch.start + launch.length
        yield Piece(start, start + length, asked, use, kind, called, operator, module, phase, launch.call, inputs)


def _operators(packed: Packed, begin: int, end: int) -> Iterator[Piece]:
    for number, call in enumerate(walk(packed)):
        if isinstance(call, Operator) and begin <= call.start <= end:
            name = packed.names[call.name] or ""
            kind, phase = operator_kind(name), phase_at(packed.phases, call.start)
            module, inputs = packed.names[call.module], packed.inputs[call.inputs]
            composite = name.startswith("aten::") and call.own < call.length
            calls_only = kind == "other" and (composite or _CALLS_ONLY.match(name) is not None)
            use = "dispatch" if calls_only else _use(kind, phase)
            yield Piece(
                call.start, call.start + call.length, call.start, use, kind, name, name, module, phase, number, inputs
            )


def _use(kind: Kind, phase: str) -> Use:
    if phase in INPUT_PHASES or kind == "host_copies":
        return "input"
    if kind in ("matmul", "attention"):
        return "products"
    return "communication" if kind == "communication" else "memory"


def rank_of(piece: Piece) -> int:
    """Of things that run at the same time, the one of the lowest rank is what the time goes to."""
    return _UNKNOWN if piece.use == "memory" and piece.kind == "other" else _RANKS[piece.use]
