"""Counts the work of a step while an untimed step runs, or, if there is none or it is compiled, on shapes alone."""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lm_profiler.analysis.dataflow.line_operators import operators_of_lines
from lm_profiler.analysis.dataflow.needless_operators import (
    backward_share_of_forward,
    factorizing_operators,
    needless_operators,
)
from lm_profiler.analysis.dataflow.repeats import repeats_layers_of_forward
from lm_profiler.analysis.dataflow.uncompiled import uncompiled_shares
from lm_profiler.analysis.hardware.roofline import Work
from lm_profiler.callbacks.instruments.instrument import Instrument, SeenFlops
from lm_profiler.callbacks.instruments.loop import Loop
from lm_profiler.callbacks.instruments.sent_step import SentStep
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.copies.module_copies import UncopyableError
from lm_profiler.measure.counts.flops import StepFlops
from lm_profiler.measure.counts.recompiles import is_compiled_in, recompilations
from lm_profiler.measure.counts.step_operators import StepOperators
from lm_profiler.measure.counts.traffic import ForwardTraffic, StepTraffic
from lm_profiler.measure.counts.uncountable import UncountableError
from lm_profiler.processes.child import Child, NamedCall, NoAnswer
from lm_profiler.record.run_record import Flops, Verb
from lm_profiler.torch_names import tree_leaves

# the most CPU time and memory of a process that counts on shapes alone
LIMIT_S = 60.0
LIMIT_BYTES = 4 << 30
# The most CPU time if training waits for it. With busy cores that may take a minute (``child.PATIENCE``).
LIMIT_IN_TRAINING_S = 20.0

# classes of optimizers that multiply matrices
_MATRIX_OPTIMIZERS = re.compile("Muon|SOAP|Shampoo|Dion|Scion|PSGD|Kron")

# phases that use only a rank's own shard; how much the other phases gather from other ranks is unknown
_FROM_SHARDS = {"zero_grad", "clip", "optimizer"}


@dataclass(frozen=True)
class StepWork:
    """The work of one step."""

    flops: Flops  # FLOPs of the step over all ranks
    # FLOPs of one rank, by the kind of work and by dtype
    by_dtype: Mapping[str, Mapping[str, int]]
    # the least bytes that one rank moves; None unless they were counted on shapes alone
    traffic: StepTraffic | None = None


@dataclass(eq=False)
class FlopsWatch(Instrument):
    """Instrument that counts FLOPs unless compiled code may run: a dispatch mode would make torch recompile it."""

    timeline: Timeline  # the timeline, whose marks separate forward from backward
    module: Callable[[], torch.nn.Module]  # returns the model; called once it exists
    forward: ForwardTraffic | None = None  # receives the operators of forward passes
    # makes the recorder of the step's operators; None if they are not recorded
    make_operators: Callable[[], StepOperators] | None = None
    name = "FLOPs"
    stage = "memory"
    _step: StepFlops | None = None
    _operators: StepOperators | None = None

    def start(self) -> None:
        """Count the FLOPs of the steps of the stage, unless they are compiled or may replay CUDA graphs."""
        # Any compilation counts, because a compiled function may belong to no module.
        is_compiled = recompilations() > 0 or is_compiled_in(self.module())
        if is_compiled:
            self.facts["seen_flops"] = SeenFlops(
                unknown="the step is compiled", compiled=True
            )
        elif _has_cuda_graphs():
            reason = "the step may replay CUDA graphs, whose FLOPs cannot be counted"
            self.facts["seen_flops"] = SeenFlops(unknown=reason)
        else:
            if self.make_operators is not None:
                self._operators = self.make_operators()
                self._operators.guard.run(self._operators.start)
            self._step = StepFlops(
                self.timeline, self.forward, operators=self._operators
            )
            self.observe(self.timeline, self._step)

    def result(self) -> Mapping[str, Any]:
        """Return the FLOPs that were counted, or why they are unknown."""
        step = self._step
        operators = self._operators
        if step is None:
            return {}
        self.discard()
        facts: dict[str, Any] = {}
        if operators is not None:
            calls = operators.take(is_complete=step.sees_all)
            if calls is not None:
                facts["needless_operators"] = needless_operators(calls)
                facts["backward_share_of_forward"] = backward_share_of_forward(calls)
                facts["repeats_forward"] = repeats_layers_of_forward(calls)
                facts["factorizing_operators"] = factorizing_operators(calls)
                facts["uncompiled_shares"] = uncompiled_shares(calls)
                facts["line_operators"] = operators_of_lines(calls)
        try:
            facts["seen_flops"] = SeenFlops(step.flops(), by_dtype=step.by_dtype())
        except UncountableError as error:
            facts["seen_flops"] = SeenFlops(unknown=str(error))
        return facts

    def discard(self) -> None:
        """Stop counting; may be called again if it fails."""
        super().discard()
        if self._step is not None:
            if self._operators is not None:
                self._operators.stop()
                self._operators = None
            self._step.stop()
            # Last, so that the next call repeats what has failed.
            self._step = None


def _has_cuda_graphs() -> bool:
    """Return whether any CUDA graph exists. torch keeps no list of its graphs, so all objects are searched."""
    if not torch.cuda.is_initialized():
        return False
    # By type(), because isinstance reads the attribute ``__class__``, which runs foreign code if the object is a proxy.
    return any(
        issubclass(type(candidate), torch.cuda.CUDAGraph)
        for candidate in gc.get_objects()
    )


def sum_over_ranks(ranks: Sequence[SeenFlops]) -> SeenFlops:
    """Return the sums over all ranks, with the dtypes of rank 0; unknown if they are unknown on one of them."""
    flops: list[Flops] = []
    for rank in ranks:
        if rank.flops is None:
            return rank
        flops.append(rank.flops)
    total = Flops(
        forward=sum(rank.forward for rank in flops),
        backward=sum(rank.backward for rank in flops),
        recomputation=sum(rank.recomputation for rank in flops),
        optimizer=sum(rank.optimizer for rank in flops),
        attention=sum(rank.attention for rank in flops),
        uncounted=_without_repeats(rank.uncounted for rank in flops),
        functions_counted=_without_repeats(rank.functions_counted for rank in flops),
    )
    return SeenFlops(total, by_dtype=ranks[0].by_dtype)


def _without_repeats(lists: Iterable[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(chain.from_iterable(lists)))


def batches_per_step(loop: Loop, verb: Verb) -> int:
    """Return how many batches a step has, on all ranks together."""
    batches_of_rank = loop.batches_per_step if verb == "fit" else 1
    return batches_of_rank * loop.world_size


def step_work(
    loop: Loop,
    verb: Verb,
    seen: SeenFlops,
    steps: int,
    get_batch: Callable[[], Any],
    limit_s: float = LIMIT_S,
) -> StepWork:
    """Return the work of one step: from the observed steps, or else from one that another process rehearses.

    Both give the same result, but the other process takes seconds.

    Args:
        loop: the loop of the run.
        verb: the verb of the run.
        seen: what all ranks have counted in the observed steps.
        steps: the number of observed steps.
        get_batch: returns the first batch, as ``without_data`` made it.
        limit_s: the most CPU time of the other process.

    Raises:
        UncountableError: the work is unknown.
    """
    # Compiled code cannot be counted where it runs. Anything else that is unknown here is unknown in a rehearsal, too.
    if seen.unknown is not None and not seen.compiled:
        raise UncountableError(seen.unknown)
    if seen.flops is not None and steps:
        return StepWork(seen.flops.times(1 / steps), _per_step(seen.by_dtype, steps))

    counted = count_elsewhere(loop, verb, loop.rehearsed_batch(get_batch), limit_s)
    assert counted.traffic is not None
    bytes_by_phase: dict[str, int | None] = dict(counted.traffic.by_phase)
    is_compiled = recompilations() > 0 or loop.is_compiled
    if is_compiled or loop.device.type != "cpu":
        # A copy on the CPU does not show what another device's kernels, or a compiler, keep for backward.
        for phase in ("forward", "backward"):
            if phase in bytes_by_phase:
                bytes_by_phase[phase] = None
    traffic = counted.traffic._replace(by_phase=bytes_by_phase)
    flops = counted.flops.times(loop.world_size)
    # The optimizers of a rehearsal compute nothing.
    uncounted = [*flops.uncounted, *_products_of_optimizers(loop.optimizers)]
    flops = flops.model_copy(update={"uncounted": uncounted})
    return StepWork(flops, counted.by_dtype, traffic)


def _products_of_optimizers(optimizers: Iterable[object]) -> list[str]:
    """Return names for the matrix products of those ``optimizers`` that are known to multiply matrices."""
    names = dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers)
    return [
        f"the matrix products of {name}"
        for name in names
        if _MATRIX_OPTIMIZERS.search(name)
    ]


def _per_step(
    by_dtype: Mapping[str, Mapping[str, int]], steps: int
) -> dict[str, dict[str, int]]:
    """Return the mean FLOPs per step, from the FLOPs of all ``steps`` together."""
    per_step: dict[str, dict[str, int]] = {}
    for work, flops_by_dtype in by_dtype.items():
        per_step[work] = {
            dtype: round(flops / steps) for dtype, flops in flops_by_dtype.items()
        }
    return per_step


def count_elsewhere(
    loop: Loop, verb: Verb, batch: Any, limit_s: float = LIMIT_S
) -> StepWork:
    """Return the work of a step on one rank from a rehearsal in a fresh process, which takes some seconds.

    Raises:
        UncountableError: the step cannot be sent, run or counted there.
    """
    try:
        pickled_step = SentStep.from_loop(loop, verb, batch).pickled()
    except UncopyableError as error:
        raise UncountableError(str(error)) from None
    # by name, because `rehearse` is a layer above, and this process need not import it
    count = NamedCall("lm_profiler.rehearse.sent.count", (pickled_step,))
    child: Child[StepWork | str] = Child(
        count, limit_s, fresh=True, limit_bytes=LIMIT_BYTES
    )
    try:
        answer = child.answer()
    except NoAnswer as error:
        raise UncountableError(
            f"counting on a copy without data failed: {error}"
        ) from None
    if isinstance(answer, str):
        raise UncountableError(answer)
    return answer


def phase_work(
    loop: Loop,
    work: StepWork | None,
    traffic: StepTraffic | None,
    batch_bytes: int | None,
) -> dict[str, Work]:
    """Return the least work of each phase that occurred in a step, on one device of the rank that writes the record.

    The bytes of a phase are None if this rank's own tensors do not show them.

    Args:
        loop: the loop of the run.
        work: the work of a step; None if it is unknown.
        traffic: the bytes that a step of the ``memory`` stage moved; None without such a step; the bytes of
            ``work`` are then used.
        batch_bytes: the bytes of all batches of a step on one rank; None if they are unknown.
    """
    traffic_on_shapes = None if work is None else work.traffic
    known_traffic = traffic or traffic_on_shapes
    if known_traffic is None:
        return {}
    moved_bytes = dict(known_traffic.by_phase)
    # The traffic has only the bytes that forward writes; it also reads the batch and the weights.
    moved_bytes["forward"] = _forward_bytes(traffic, traffic_on_shapes, batch_bytes)
    if "clip" in moved_bytes and not loop.clips:
        is_unknown = loop.clips is None
        moved_bytes["clip"] = None if is_unknown else 0
    known_phases = _phases_shown_by_own_tensors(loop, moved_bytes)
    flops = _flops_by_phase(work)
    phases = {}
    for phase, phase_bytes in moved_bytes.items():
        known_bytes = phase_bytes if phase in known_phases else None
        phases[phase] = Work(flops.get(phase, {}), known_bytes)
    if loop.device.type != "cpu":
        phases["transfer"] = Work(flops={}, bytes=batch_bytes, on_the_bus=True)
    return phases


def _phases_shown_by_own_tensors(loop: Loop, phases: Iterable[str]) -> set[str]:
    """Return the ``phases`` whose bytes this rank's own tensors show."""
    known_phases = set(phases)
    if loop.holdings == "shards":
        known_phases &= _FROM_SHARDS
    elif loop.holdings == "unknown":
        known_phases = set()
    if len(loop.optimizers) > 1:
        # It is unknown which of them a step uses.
        known_phases &= {"forward"}
    return known_phases


def _flops_by_phase(work: StepWork | None) -> dict[str, Mapping[str, int] | None]:
    """Return the FLOPs of forward, backward and the optimizer, by dtype; None if they are unknown."""
    if work is None:
        return {"forward": None, "backward": None}
    forward = work.by_dtype.get("forward", {})
    # Activation checkpointing recomputes activations in backward.
    backward = Counter(work.by_dtype.get("backward", {}))
    backward += Counter(work.by_dtype.get("recomputation", {}))
    return {
        "forward": forward,
        "backward": backward,
        "optimizer": work.by_dtype.get("optimizer", {}),
    }


def count_tensors(batch: Any) -> int:
    """Return the number of tensors in ``batch``."""
    return sum(isinstance(leaf, Tensor) for leaf in tree_leaves(batch))


def bytes_of_batch(batch: Any) -> int:
    """Return the bytes of all tensors in ``batch``."""
    return sum(
        leaf.numel() * leaf.element_size()
        for leaf in tree_leaves(batch)
        if isinstance(leaf, Tensor)
    )


def _forward_bytes(
    traffic: StepTraffic | None,
    traffic_on_shapes: StepTraffic | None,
    batch_bytes: int | None,
) -> int | None:
    """Return the bytes that forward reads and writes; None if they are unknown.

    Args:
        traffic: the traffic of a step that ran; None without such a step.
        traffic_on_shapes: the traffic of a step that was rehearsed without data; None without such a step.
        batch_bytes: the bytes of all batches of a step; None if they are unknown.
    """
    known_traffic = traffic or traffic_on_shapes
    if known_traffic is None:
        return None
    written_bytes = known_traffic.by_phase.get("forward", 0)
    read_bytes = known_traffic.forward_read
    is_compiled = traffic is not None and read_bytes is None
    if is_compiled:
        # The tensors that autograd saved count as written. They include the batch, which forward did not write.
        if batch_bytes is None or traffic_on_shapes is None or written_bytes is None:
            return None
        written_bytes = max(written_bytes - batch_bytes, 0)
        read_bytes = traffic_on_shapes.forward_read
    if read_bytes is None or written_bytes is None:
        return None
    return read_bytes + written_bytes
