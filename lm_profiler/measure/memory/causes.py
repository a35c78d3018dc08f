"""Splits memory by cause: parameters, gradients, optimizer states, buffers, and the rest; now and at peaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lm_profiler.measure.boundary import UNGUARDED, Guard
from lm_profiler.measure.clocks.tape import BACKWARD, FORWARD, OPTIMIZER, OUTSIDE
from lm_profiler.measure.memory.saved_tensors import SavedTensors
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run_record import MemoryCauses, MemoryLevels
from lm_profiler.torch_names import tree_leaves


class Holdings(NamedTuple):
    """Bytes held on one device. Each storage counts once, for its first cause in this order."""

    parameters: int
    gradients: int
    optimizer_states: int
    buffers: int

    @property
    def total(self) -> int:
        return sum(self)


def holdings(
    module: nn.Module, optimizers: Sequence[Optimizer], device: torch.device
) -> Holdings:
    """Return what ``module`` and ``optimizers`` hold now on ``device``.

    Tied weights and views count once, and a sharded tensor (DTensor, FSDP) counts with its local part. Parameters that
    only an optimizer holds (master weights) count as its states. Some memory is not seen, and counts as the rest:
    sparse gradients, DDP's buckets (except with ``gradient_as_bucket_view``), FSDP's gathered parameters, and the
    allocator's rounding.
    """
    return _sums(storages_by_cause(module, optimizers, device))


def _sums(causes: Iterable[Mapping[int, int]]) -> Holdings:
    return Holdings(*(sum(sizes.values()) for sizes in causes))


def storages_by_cause(
    module: nn.Module, optimizers: Sequence[Optimizer], device: torch.device
) -> Iterator[dict[int, int]]:
    """Yield, for each field of ``Holdings`` in its order, the bytes of each storage on ``device``.

    No storage occurs twice: it counts for the first field whose tensors use it.
    """
    parameters = list(module.parameters())
    # by identity, because the hash of a tensor takes five times as long
    parameter_ids = {id(parameter) for parameter in parameters}
    master_weights = []
    for weight in _optimizer_parameters(optimizers):
        if id(weight) not in parameter_ids:
            master_weights.append(weight)
    gradients = _gradients_of((*parameters, *master_weights))
    optimizer_states = chain(master_weights, tensors_in(_parameter_states(optimizers)))
    buffers = module.buffers()
    tensors_by_cause = (parameters, gradients, optimizer_states, buffers)
    counted: set[int] = set()
    for tensors in tensors_by_cause:
        sizes = storage_sizes(tensors, device)
        uncounted_sizes = {
            storage: size for storage, size in sizes.items() if storage not in counted
        }
        counted.update(uncounted_sizes)
        yield uncounted_sizes


def _parameter_states(optimizers: Sequence[Optimizer]) -> Iterator[Any]:
    """Yield the states of all parameters, also those of optimizers within ``optimizers``."""
    for optimizer in optimizers:
        yield from optimizer.state.values()
    for optimizer in optimizers:
        # where a ZeroRedundancyOptimizer keeps the states of its rank
        inner = getattr(optimizer, "optim", None)
        if inner is not None:
            yield from inner.state.values()


def split_by_cause(peak_allocated: int | None, held: Holdings) -> MemoryCauses:
    """Split ``peak_allocated`` by what was ``held`` at that time; the rest is None if it would be negative."""
    rest_bytes = None
    if peak_allocated is not None and peak_allocated >= held.total:
        rest_bytes = peak_allocated - held.total
    return MemoryCauses(**held._asdict(), activations_and_rest=rest_bytes)


class _PeakReading(NamedTuple):
    """The peak of a part of a step, and what was held then."""

    peak_bytes: int | None
    held: Holdings


def _peak_and_total(reading: _PeakReading) -> tuple[int, int]:
    """Return a sort key: by the peak, and of equal peaks by what was held."""
    return reading.peak_bytes or 0, reading.held.total


class _GradientReading(NamedTuple):
    """The peak so far when a gradient arrived, and the bytes of all gradients that had arrived."""

    peak_bytes: int
    gradient_bytes: int


@dataclass(eq=False)
class HoldingsReader:
    """Finds what was held at the peak of each part of a step: an observer of marks, for a stage that is not timed.

    It must come before ``PartPeaks`` among the observers, which resets the peak that this one reads.

    Holdings are read when parts begin and end. The larger of the two readings around a part counts: that much was held
    at some time in between, so it never exceeds the peak. During backward, gradients grow while activations shrink. So
    hooks note each gradient that arrives, and count the gradients that exist at the peak, to within one. If no such
    hook runs (FSDP2), all gradients of the part count, and its activations are a lower bound. A compiled backward sets
    its gradients only when it ends. Until then their bytes count as "activations and rest", which is then an upper
    bound.

    It also keeps the levels of the last step: the bytes held at its start, after forward and after backward. If the
    allocator does not report what it holds (on the CPU), a level is the sum of the storages of all causes and of the
    tensors that autograd saved for backward. It leaves out outputs that nothing saved.
    """

    module: nn.Module
    # the plain optimizers, without Lightning's wrapping
    optimizers: Sequence[Optimizer]
    # returns the most bytes allocated since the last reset; None if that is unknown
    peak_bytes: Callable[[], int | None]
    device: torch.device  # the device whose memory is read
    # returns the bytes that the allocator holds now; None if it does not report them
    held_bytes: Callable[[], int | None]
    guard: Guard = UNGUARDED  # handles errors in a hook

    def __post_init__(self) -> None:
        # memory by cause before and after the optimizer's step, by the names of these moments
        self.moments: dict[str, MemoryCauses] = {}
        # the levels of the last step that ended
        self.levels: MemoryLevels | None = None
        self.saved_tensors = SavedTensors(self.guard)
        self._source: Literal["allocator", "counted"] = "allocator"
        if self.held_bytes() is None:
            self._source = "counted"
        # the levels of the current step, by the fields of ``MemoryLevels``
        self._level_bytes: dict[str, int] = {}
        self._hooks: list[Any] = []
        # the current part; None before a step's first mark
        self._part: int | None = None
        # what was held when the current part began
        self._held_at_begin = Holdings(
            parameters=0, gradients=0, optimizer_states=0, buffers=0
        )
        # the gradients that exist: bytes by storage
        self._arrived_gradients: dict[int, int] = {}
        # the reading of the last gradient hook in the current part at which the peak had risen
        self._highest_at_gradient_hook: _GradientReading | None = None
        # the highest peak of each part, by the part's code
        self._peaks_by_part: dict[int, _PeakReading] = {}

    def start(self) -> None:
        """Add a hook to each parameter that is called when its gradient has arrived."""
        on_gradient = self.guard.wrap(self._gradient_arrived)
        for parameter in self.module.parameters():
            if parameter.requires_grad and parameter.is_leaf:
                self._hooks.append(
                    parameter.register_post_accumulate_grad_hook(on_gradient)
                )

    def stop(self) -> None:
        """Remove the hooks of parameters, and stop watching what autograd saves."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.saved_tensors.unwatch()

    def __call__(self, code: int) -> None:
        """Read what is held at the mark that begins the part ``code`` and ends the part before it."""
        peak_bytes = self.peak_bytes()
        # the bytes by storage, for each field of ``Holdings`` in its order
        causes = [*storages_by_cause(self.module, self.optimizers, self.device)]
        held = _sums(causes)
        ended_part = self._part
        if ended_part is None:
            self.saved_tensors.watch()
        self._keep_levels(ended_part, code, causes)
        if code == OPTIMIZER:
            self.moments["before_optimizer"] = split_by_cause(self.held_bytes(), held)
        elif ended_part == OPTIMIZER:
            self.moments["after_optimizer"] = split_by_cause(self.held_bytes(), held)
        if ended_part is not None and ended_part != OUTSIDE:
            reading = _PeakReading(peak_bytes, self._held_at_peak(peak_bytes, held))
            highest_before = self._peaks_by_part.get(ended_part, reading)
            highest = max(highest_before, reading, key=_peak_and_total)
            self._peaks_by_part[ended_part] = highest
        self._part = code
        self._held_at_begin = held
        self._highest_at_gradient_hook = None
        # gradients are the second field of ``Holdings``
        _, gradient_storages, *_ = causes
        self._arrived_gradients = gradient_storages

    def _keep_levels(
        self, ended_part: int | None, begun_part: int, causes: Sequence[dict[int, int]]
    ) -> None:
        """Keep the bytes that are held if forward or backward ends, or if the step's first forward begins."""
        if ended_part in (FORWARD, BACKWARD):
            # With accumulation a step has several passes, of which the highest level counts.
            phase = PARTS[ended_part]
            earlier_level = self._level_bytes.get(phase, 0)
            self._level_bytes[phase] = max(earlier_level, self._held_bytes_by(causes))
        if begun_part == FORWARD and "start" not in self._level_bytes:
            self._level_bytes["start"] = self._held_bytes_by(causes)

    def step_ended(self) -> None:
        """Keep the levels of the step that ends, and start again for the next step."""
        self.levels = MemoryLevels(
            start=self._level_bytes.get("start"),
            forward=self._level_bytes.get("forward"),
            backward=self._level_bytes.get("backward"),
            source=self._source,
        )
        self.saved_tensors.unwatch()
        self._part = None
        self._level_bytes = {}

    def by_part(self) -> dict[str, MemoryCauses]:
        """Return the highest peak of each part that occurred, over all observed steps, by cause."""
        causes: dict[str, MemoryCauses] = {}
        for code, part in enumerate(PARTS):
            if code in self._peaks_by_part:
                reading = self._peaks_by_part[code]
                causes[part] = split_by_cause(reading.peak_bytes, reading.held)
        return causes

    def _held_at_peak(self, peak_bytes: int | None, held_at_end: Holdings) -> Holdings:
        """Return what was held at the peak of the part that ends: the larger of the readings at its start and end.

        If gradient hooks ran in the part, gradients count as at the peak: all that have arrived if the peak came after
        the last hook, and otherwise those that had arrived at the first hook that saw the peak.
        """
        held = held_at_end
        if self._held_at_begin.total >= held_at_end.total:
            held = self._held_at_begin
        highest = self._highest_at_gradient_hook
        if highest is None or peak_bytes is None:  # no hook ran, or no peak is known
            return held
        came_after_last_hook = peak_bytes > highest.peak_bytes
        if came_after_last_hook:
            return held._replace(gradients=sum(self._arrived_gradients.values()))
        return held._replace(gradients=highest.gradient_bytes)

    def _held_bytes_by(self, causes: Sequence[Mapping[int, int]]) -> int:
        """Return the bytes that are held now; ``causes`` holds the storages of each field of ``Holdings``."""
        if self._source == "allocator":
            return self.held_bytes() or 0
        sizes = storage_sizes(self.saved_tensors, self.device)
        for cause in causes:
            sizes.update(cause)
        return sum(sizes.values())

    def _gradient_arrived(self, parameter: Tensor) -> None:
        """Note that a parameter's gradient has arrived; note the peak, too, if it has risen since the last gradient."""
        # None if an optimizer that steps inside of backward has cleared it already
        if parameter.grad is not None:
            self._arrived_gradients.update(
                storage_sizes((parameter.grad,), self.device)
            )
        peak_bytes = self.peak_bytes()
        if peak_bytes is None:
            return
        highest = self._highest_at_gradient_hook
        if highest is None or peak_bytes > highest.peak_bytes:
            gradient_bytes = sum(self._arrived_gradients.values())
            self._highest_at_gradient_hook = _GradientReading(
                peak_bytes, gradient_bytes
            )


def _optimizer_parameters(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    """Yield the parameters that ``optimizers`` step."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def gradients(module: nn.Module, optimizers: Sequence[Optimizer]) -> list[Tensor]:
    return _gradients_of((*module.parameters(), *_optimizer_parameters(optimizers)))


def _gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients that exist, each once."""
    # without duplicates, because usually both the module and an optimizer have a parameter
    return [
        parameter.grad
        for parameter in dict.fromkeys(parameters)
        if parameter.grad is not None
    ]


def tensors_in(states: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors in the ``states`` of an optimizer, which usually are dicts of tensors and numbers."""
    for state in states:
        # The usual case is written out: ``tree_leaves`` takes ten times as long, and a model has thousands of states.
        values: Iterable[Any] = state.values() if type(state) is dict else (state,)
        for value in values:
            if isinstance(value, Tensor):
                yield value
            else:
                yield from (
                    leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)
                )


def storage_sizes(tensors: Iterable[Tensor], device: torch.device) -> dict[int, int]:
    """Return the bytes of each storage on ``device``, by its identity."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        # Nearly all tensors are plain, and need not be checked by ``plain_tensors_of``.
        is_plain = (
            type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        )
        plain_tensors = (tensor,) if is_plain else plain_tensors_of(tensor)
        for piece in plain_tensors:
            storage = _storage_of(piece)
            if storage is None:
                continue
            if _is_same_device(storage.device, device):
                sizes[id(storage)] = storage.nbytes()
    return sizes


def _is_same_device(device: torch.device, wanted: torch.device) -> bool:
    """Return whether ``device`` is the ``wanted`` one; one without an index stands for all devices of its type."""
    if device == wanted:
        return True
    return device.type == wanted.type and wanted.index in (None, device.index)


def plain_tensors_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors in which ``tensor`` is stored in this process."""
    if hasattr(tensor, "to_local"):  # DTensor
        with torch.no_grad():
            yield from plain_tensors_of(tensor.to_local())
    elif hasattr(tensor, "__tensor_flatten__"):  # any other wrapper subclass
        for name in tensor.__tensor_flatten__()[0]:
            yield from plain_tensors_of(getattr(tensor, name))
    elif tensor.layout is torch.strided and _storage_of(tensor) is not None:
        yield tensor


def _storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the storage of ``tensor``; None in functions of ``torch.func``, where a tensor stands for another one."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None
