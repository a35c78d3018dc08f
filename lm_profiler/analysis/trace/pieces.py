"""What ran in traced steps, piece by piece, from one walk over the trace: all that is asked of it begins here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from lm_profiler.analysis.trace.intervals import phase_finder
from lm_profiler.analysis.trace.kinds import kernel_kind, operator_kind
from lm_profiler.analysis.trace.walk import Inputs, LaunchCall, Operator, Packed, Range, walk
from lm_profiler.record.kernels import Kind

# What a device's time is used for. ``dispatch``, on the CPU alone: an operator that only calls others.
Use = Literal["products", "memory", "communication", "input", "dispatch"]

_RANKS: dict[Use, int] = {"products": 0, "memory": 1, "communication": 3, "input": 4, "dispatch": 5}
_UNKNOWN = 2  # of memory's: what is known by name goes first, for a compiled region may hold it

# operators that compute nothing: views, empty tensors, autograd's nodes, what surrounds compiled graphs
_CALLS_ONLY = re.compile(
    r"^(autograd|profiler|torch)::|^\w+Backward\d*$|^(detach|Optimizer\.)|^Torch|^AOTDispatcher|^Pregraph|^CompiledFunction|"
    r"^aten::(_?(unsafe_)?(view|reshape|split|chunk|unbind|expand|empty|new_empty|to|narrow|select|slice|squeeze|"
    r"unsqueeze|t|transpose|permute|detach|alias|flatten|unflatten|item|is_\w+|as_strided|resolve_(conj|neg)|result_type|"
    r"resize|set|lift_fresh|contiguous|movedim|diagonal|real|imag|numpy_T|unfold|size|stride|broadcast_to|swapaxes|"
    r"empty_like|empty_strided|new_empty_strided|expand_as|view_as|conj|view_as_(real|complex)|split_with_sizes)_?(_alias)?)$"
)

INPUT_PHASES = frozenset({"data", "transfer"})  # what runs in these, or waits there, is due to the batch


class Piece(NamedTuple):
    """One kernel, or one call of an operator where the device is the CPU. None is unknown, or none.

    ``asked`` is when the host had asked for it. ``call`` tells the calls of ``operator`` apart: one may launch several
    kernels. ``own`` is its length without that of the operators that it calls, ``caller`` the operator that called it,
    or launched it. ``again`` is a call of an operator by itself, another overload, which is no further call.
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
    own: int = 0
    caller: str | None = None
    again: bool = False


@dataclass(frozen=True)
class TracedWork:
    """The work that was wanted between ``begin`` and ``end``, the window of the whole ``steps``.

    ``launches`` are all calls of the driver, as they end, with numbers of ``names``; none where the device is the CPU.
    """

    pieces: list[Piece]
    launches: list[LaunchCall]
    names: Sequence[str | None]
    steps: Sequence[Range]
    phases: Sequence[Range]
    on_device: bool
    begin: int
    end: int
    collectives: Sequence[Range] = ()  # collectives that ran on the host
    gathers: Sequence[Range] = ()  # where FSDP2 asked for parameters, with the name of their module

    @cached_property
    def phase_starts(self) -> list[int]:
        """Where each of ``phases`` begins, to be searched by bisection."""
        return [phase.start for phase in self.phases]


def traced_work(packed: Packed) -> TracedWork:
    """Return what ran in the trace's steps: kernels where it has any, else operators of the CPU.

    Raises:
        ValueError: there is no whole step in the trace.
    """
    begin, end = packed.window()
    launches = [event for event in walk(packed) if isinstance(event, LaunchCall)] if packed.has_device else []
    pieces = list(_kernels(packed, launches, begin, end) if packed.has_device else _operators(packed, begin, end))
    return TracedWork(
        pieces, launches, packed.names, packed.steps, packed.phases, packed.has_device, begin, end,
        packed.collectives, packed.gathers,
    )  # fmt: skip


def _kernels(packed: Packed, calls: Sequence[LaunchCall], begin: int, end: int) -> Iterator[Piece]:
    """Yield what was launched while the steps lasted, by its start. A replayed CUDA graph has the graph's one
    launch."""
    launches, phase_at = {call.correlation: call for call in calls}, phase_finder(packed.phases)
    for start, length, name, correlation in packed.device():
        # Without its launch there is only the work itself to tell when it was wanted.
        launch = launches.get(correlation) or LaunchCall(start, correlation, -1, -1)
        if not begin <= launch.start <= end:
            continue
        called, operator = packed.names[name] or "", packed.names[launch.operator]
        kind, phase = kernel_kind(called, operator), phase_at(launch.start)
        module, inputs = packed.names[launch.module], packed.inputs[launch.inputs]
        use, asked = _use(kind, phase), launch.start + launch.length
        inside = (phase, launch.call, inputs, length, operator)
        yield Piece(start, start + length, asked, use, kind, called, operator, module, *inside)


def _operators(packed: Packed, begin: int, end: int) -> Iterator[Piece]:
    names, inputs, phase_at = packed.names, packed.inputs, phase_finder(packed.phases)
    for number, event in enumerate(walk(packed)):
        if not isinstance(event, Operator):
            continue
        start, length, own, called, caller, module, again, given = event
        if not begin <= start <= end:
            continue
        name, phase = names[called] or "", phase_at(start)
        kind, use = _work_of(name, own < length, phase)
        of = (kind, name, name, names[module], phase, number, inputs[given])
        yield Piece(start, start + length, start, use, *of, own, names[caller], again)


@lru_cache(maxsize=4096)
def _work_of(name: str, calls_others: bool, phase: str) -> tuple[Kind, Use]:
    """Return what the operator ``name`` does in ``phase``, and what its time is used for."""
    kind = operator_kind(name)
    composite = name.startswith("aten::") and calls_others
    only_calls = kind == "other" and (composite or _CALLS_ONLY.match(name) is not None)
    return kind, "dispatch" if only_calls else _use(kind, phase)


def _use(kind: Kind, phase: str) -> Use:
    if phase in INPUT_PHASES or kind == "host_copies":
        return "input"
    if kind in ("matmul", "attention"):
        return "products"
    return "communication" if kind == "communication" else "memory"


def rank_of(piece: Piece) -> int:
    """Return the rank: of things that run at the same time, the one of the lowest rank has the time."""
    return _UNKNOWN if piece.use == "memory" and piece.kind == "other" else _RANKS[piece.use]
