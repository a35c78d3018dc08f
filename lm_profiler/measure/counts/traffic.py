"""Finds a lower bound of the bytes that each phase of a step moves between a device and its memory.

Each tensor counts once per phase, with its size on the device; caches are ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lm_profiler.measure.clocks.tape import (
    BACKWARD,
    CLIP,
    FORWARD,
    OPTIMIZER,
    ZERO_GRAD,
)
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.memory.causes import (
    gradients,
    plain_tensors_of,
    storage_sizes,
    storages_by_cause,
    tensors_in,
)
from lm_profiler.measure.memory.saved_tensors import SavedTensors
from lm_profiler.record.quantities import PARTS
from lm_profiler.torch_names import tree_leaves

# operators that read one row of their first tensor per index
_LOOK_UPS = {
    "embedding",
    "_embedding_bag",
    "_embedding_bag_forward_only",
    "embedding_renorm_",
}
# operators that read as many elements of their first tensor as their result has
_GATHERS = {"index", "index_select", "gather", "take", "_index_put_impl_"}
# operators that read a tensor's shape, and not its elements
_SHAPES_ALONE = {
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "randint_like",
    "new_empty",
    "new_empty_strided",
    "new_zeros",
    "new_ones",
    "new_full",
}


class Regions:
    """Distinct pieces of storages. Partial overlaps count twice, but no storage counts for more than its size."""

    def __init__(self) -> None:
        # the identity of a storage to its pieces, each with its bytes; a piece is an offset and a number of elements
        self._pieces: dict[int, dict[tuple[int, int], int]] = {}
        # the identity of a storage to its size, and to a reference to it
        self._storage_bytes: dict[int, int] = {}
        self._storages: dict[int, ref[Any]] = {}

    def add(self, tensor: Tensor, count: int | None = None) -> None:
        """Add ``tensor``, or only ``count`` bytes of it."""
        storage = tensor.untyped_storage()
        identity = id(storage)
        known_storage = self._storages.get(identity)
        if known_storage is not None and known_storage() is not storage:
            self._rename_freed(identity)
        self._storages[identity] = ref(storage)

        size = tensor.nbytes if count is None else min(count, tensor.nbytes)
        piece_bytes = self._pieces.setdefault(identity, {})
        piece = int(tensor.storage_offset()), tensor.numel()
        piece_bytes[piece] = max(piece_bytes.get(piece, 0), size)
        self._storage_bytes[identity] = storage.nbytes()

    def _rename_freed(self, identity: int) -> None:
        """Move the pieces of a freed storage to an unused key, because a new storage has its ``identity``."""
        unused_key = -len(self._pieces)  # real identities are positive
        self._pieces[unused_key] = self._pieces.pop(identity)
        self._storage_bytes[unused_key] = self._storage_bytes.pop(identity)

    def bytes_by_storage(self) -> dict[int, int]:
        """Return how many bytes were added of each storage; equal pieces count once."""
        sizes: dict[int, int] = {}
        for storage, piece_bytes in self._pieces.items():
            all_pieces = sum(piece_bytes.values())
            sizes[storage] = min(self._storage_bytes[storage], all_pieces)
        return sizes


class ForwardTraffic:
    """Collects what forward passes read and did not make themselves (weights, inputs, buffers), and what they made.

    ``note_call`` receives each operator that runs. A weight counts once per pass, however often it is used; of a table
    only the rows count that are looked up. Views read nothing.
    """

    def __init__(self) -> None:
        # whether reading an operator failed: then the bytes of this and all later passes are unknown
        self.lost = False
        # the storages that the current or last pass made, by their identity
        self._made_storages: dict[int, ref[Any]] = {}
        # the identities of the storages among them that hold copies of weights and inputs in autocast's dtype
        self.copied_storages: set[int] = set()
        self._passes = 0
        # the bytes that the passes before the current one have read
        self._bytes_read = 0
        self._reads = Regions()

    def begin(self) -> None:
        """Begin a forward pass; a step may have several."""
        self._end_pass()
        self._passes += 1

    def _end_pass(self) -> None:
        """Add what the last pass read, if there was one, and forget its storages."""
        self._bytes_read += sum(self._reads.bytes_by_storage().values())
        self._made_storages = {}
        self.copied_storages = set()
        self._reads = Regions()

    @property
    def made_storages(self) -> set[int]:
        """The identities of the storages that the current or last pass made, and that still exist."""
        made = set()
        for identity, storage in self._made_storages.items():
            if storage() is not None:
                made.add(identity)
        return made

    def _has_made(self, tensor: Tensor) -> bool:
        """Return whether the current pass made the storage of ``tensor``."""
        storage = tensor.untyped_storage()
        made_storage = self._made_storages.get(id(storage))
        # A storage that the pass made and freed may have had the same identity.
        return made_storage is not None and made_storage() is storage

    def take(self) -> int | None:
        """Return the bytes read by all passes since the last call, and restart the count from zero.

        None if there was no pass, or if ``lost`` is set.
        """
        self._end_pass()
        has_passes = self._passes > 0
        is_complete = has_passes and not self.lost
        bytes_read = self._bytes_read if is_complete else None
        self._passes = 0
        self._bytes_read = 0
        return bytes_read

    def note_call(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add what a call of ``operator`` in the current pass reads, and note the storages that it makes."""
        name = operator.__name__.partition(".")[0]  # without the name of the overload
        inputs = list(_tensors((args, kwargs)))
        results = list(_tensors(result))
        input_storages = {_identity(tensor) for tensor in inputs}
        result_storages = {_identity(tensor) for tensor in results}
        # A view shares its input's storage, and so does an operator that writes in place or into ``out``.
        writes_input = name.endswith("_") or "out" in kwargs
        views: set[int] = set()
        if not writes_input:
            views = result_storages & input_storages
        # inputs that the pass did not make itself: weights, batches and buffers
        outer_inputs: list[Tensor] = []
        for tensor in inputs:
            is_read = not self._has_made(tensor) and _identity(tensor) not in views
            if is_read and name not in _SHAPES_ALONE:
                outer_inputs.append(tensor)
        for tensor in outer_inputs:
            # known if the operator reads only some rows of its first input
            rows_bytes = None
            if tensor is inputs[0]:
                rows_bytes = _rows_bytes(name, inputs, results)
            self._reads.add(tensor, rows_bytes)

        new_storages = result_storages - input_storages
        for tensor in results:
            if _identity(tensor) in new_storages:
                self._made_storages[_identity(tensor)] = ref(tensor.untyped_storage())
        # A new storage may have the identity of a copy that was freed.
        self.copied_storages -= new_storages
        if name == "_to_copy" and outer_inputs:
            self.copied_storages |= new_storages


def _rows_bytes(name: str, inputs: list[Tensor], results: list[Tensor]) -> int | None:
    """Return the bytes that a look-up reads of its table, the first of ``inputs``; None if it reads all of it."""
    table = inputs[0]
    if name in _LOOK_UPS and len(inputs) > 1:
        row_bytes = table.shape[-1] * table.element_size()
        return inputs[1].numel() * row_bytes
    if name in _GATHERS and results:
        return results[0].numel() * table.element_size()
    return None


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the dense tensors in nested ``values``."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            yield leaf


def _identity(tensor: Tensor) -> int:
    return id(tensor.untyped_storage())


class StepTraffic(NamedTuple):
    """The bytes that a step moves."""

    # bytes of each phase that occurred, None if unknown; of forward only what it writes
    by_phase: Mapping[str, int | None]
    # Bytes that the forward pass reads. None if the step is compiled, so that its operators were not seen; then
    # the bytes of forward in ``by_phase`` include saved inputs.
    forward_read: int | None


@dataclass(eq=False)
class TrafficReader:
    """Measures the traffic of each step and keeps that of the last. Observes marks, in a stage that is not timed.

    - forward: reads as in ``ForwardTraffic``; writes the tensors that it makes and that are saved for backward.
    - backward: reads the saved tensors, weights included, and the gradients that it adds to; writes gradients.
    - zero_grad: writes zeros into the gradients, unless it drops them.
    - clip: reads gradients.
    - optimizer: reads gradients, reads and writes their parameters and states. Unknown if a gradient is sparse,
      because then only some of the rows may be touched.
    """

    module: nn.Module
    # the plain optimizers, without Lightning's wrapping
    optimizers: Sequence[Optimizer]
    device: torch.device  # only tensors in its memory count
    timeline: Timeline  # the timeline whose marks are observed
    # what autograd saved; ``HoldingsReader`` switches it on and off
    saved: SavedTensors
    # ``StepFlops`` passes the operators of forward passes to it
    forward: ForwardTraffic
    traffic: StepTraffic | None = None  # the traffic of the last step that ended
    # the bytes of the running step, by phase
    _bytes: Counter[str] = field(default_factory=Counter)
    _open_parts: frozenset[int] = frozenset()
    _has_sparse_gradients: bool = False
    # the parameters that the optimizers step
    _stepped: list[Tensor] = field(default_factory=list)
    _stepped_gradient_bytes: int = 0
    # whether there are gradients that no step of an optimizer has used: a backward pass has begun since the last step
    _has_new_gradients: bool = False

    def __call__(self, code: int) -> None:
        """Note which parts of the step begin and end at a mark."""
        parts_before = self._open_parts
        self._open_parts = frozenset(self.timeline.stack)
        for part in self._open_parts - parts_before:
            self._part_begins(part)
        for part in parts_before - self._open_parts:
            self._part_ends(part)

    def step_ended(self) -> None:
        """Keep the traffic of the step that ends, and start again from zero."""
        by_phase: dict[str, int | None] = dict(self._bytes)
        if self._has_sparse_gradients:
            by_phase[PARTS[OPTIMIZER]] = None
        self.traffic = StepTraffic(by_phase, self.forward.take())
        self._bytes = Counter()
        self._open_parts = frozenset()
        self._has_sparse_gradients = False

    def _part_begins(self, part: int) -> None:
        """Add the bytes that ``part`` moves, as far as they are known when it begins."""
        if part == FORWARD:
            # so that forward has an entry even if it saves nothing
            self._add(FORWARD, 0)
        elif part == BACKWARD:
            self._has_new_gradients = True
            saved_bytes = self._saved_bytes()
            self._add(BACKWARD, sum(saved_bytes.values()) + self._gradient_bytes())
            # forward has written what it made; the other saved tensors, such as weights, it has only read
            made_storages = self._made_by_forward(saved_bytes)
            written_by_forward = 0
            for storage, size in saved_bytes.items():
                if storage in made_storages:
                    written_by_forward += size
            self._add(FORWARD, written_by_forward)
        elif part == CLIP:
            self._add(CLIP, self._gradient_bytes())
        elif part == OPTIMIZER:
            self._note_optimizer_inputs()

    def _part_ends(self, part: int) -> None:
        """Add the bytes that ``part`` has moved, as far as they are known only when it ends."""
        if part in (BACKWARD, ZERO_GRAD):
            self._add(part, self._gradient_bytes())
        elif part == OPTIMIZER and self._has_new_gradients:
            # Before the closure of an optimizer, which runs forward and backward, it has changed nothing yet.
            self._has_new_gradients = False
            self._add_optimizer_step()

    def _note_optimizer_inputs(self) -> None:
        """Note which parameters are stepped, and the bytes of their gradients, which the step may clear."""
        parameters: dict[Tensor, None] = {}  # a dict keeps their order
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                parameters.update(dict.fromkeys(group["params"]))
        self._stepped = [
            parameter for parameter in parameters if parameter.grad is not None
        ]
        # Counted together, because FSDP's gradients are views of one storage.
        self._stepped_gradient_bytes = self._stored_bytes(
            parameter.grad for parameter in self._stepped if parameter.grad is not None
        )

    def _add_optimizer_step(self) -> None:
        """Add the bytes of an optimizer's step that has ended; the first step makes its states."""
        states: list[Any] = []
        for optimizer in self.optimizers:
            states.extend(
                optimizer.state.get(parameter, {}) for parameter in self._stepped
            )
        read_and_written = self._stored_bytes([*self._stepped, *tensors_in(states)])
        self._add(OPTIMIZER, 2 * read_and_written + self._stepped_gradient_bytes)
        for parameter in self._stepped:
            if parameter.grad is not None and parameter.grad.is_sparse:
                self._has_sparse_gradients = True

    def _saved_bytes(self) -> dict[int, int]:
        """Return the bytes that autograd saved of each storage on the device, by the storage's identity."""
        regions = Regions()
        for tensor in self.saved:
            for piece in plain_tensors_of(tensor):
                if self._is_on_device(piece):
                    regions.add(piece)
        return regions.bytes_by_storage()

    def _is_on_device(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is in the memory of the device whose traffic is measured."""
        device = tensor.untyped_storage().device
        # A device without an index stands for all devices of its type.
        is_same_index = self.device.index in (None, device.index)
        return device.type == self.device.type and is_same_index

    def _made_by_forward(self, saved: Iterable[int]) -> set[int]:
        """Return the storages that the forward pass made.

        If no operator was seen, they are the ``saved`` storages that hold no parameter, gradient, state or buffer.
        """
        if self.forward.made_storages:
            return self.forward.made_storages - self.forward.copied_storages
        storages_with_cause = chain.from_iterable(
            storages_by_cause(self.module, self.optimizers, self.device)
        )
        return set(saved) - set(storages_with_cause)

    def _gradient_bytes(self) -> int:
        return self._stored_bytes(gradients(self.module, self.optimizers))

    def _stored_bytes(self, tensors: Iterable[Tensor]) -> int:
        return sum(storage_sizes(tensors, self.device).values())

    def _add(self, part: int, count: int) -> None:
        self._bytes[PARTS[part]] += count
