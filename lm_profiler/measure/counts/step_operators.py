"""Records the operators of one step as calls that read and write storages, for ``analysis.dataflow``.

Keeps no tensor alive. Of the elements of tensors only the zeros in matrix products and gradients of tables are counted.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, wraps
from inspect import getfile
from opcode import opname
from traceback import walk_stack
from types import CodeType, FrameType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.backends import mkldnn
from torch.optim import Optimizer

from lm_profiler.measure.boundary import Guard
from lm_profiler.measure.checksums import checksum_of
from lm_profiler.measure.counts.call_tensors import (
    base_name,
    changed_arguments,
    dense_tensors,
    has_sparse,
    leaves,
    overwritten_inputs,
    sparse_matrices,
    stored_elements,
    with_parts_of_sparse,
)
from lm_profiler.measure.counts.causal_masks import causal_length, mask_of_attention
from lm_profiler.measure.counts.float32_times import float32_share, has_half_input
from lm_profiler.measure.counts.fourier_times import fourier_share
from lm_profiler.measure.counts.layout_times import channels_last_share
from lm_profiler.measure.counts.linear_maps import (
    linear_map_of_call,
    tensors_added_elementwise,
)
from lm_profiler.measure.counts.operator_trials import OperatorTrials, TimedCall
from lm_profiler.measure.counts.patch_times import linear_share
from lm_profiler.measure.counts.replaced_method import replaced_method
from lm_profiler.measure.counts.sparse_times import csr_share, is_sparse_product
from lm_profiler.measure.counts.storage_numbers import StorageNumbers
from lm_profiler.measure.counts.value_numbers import ValueNumbers
from lm_profiler.measure.counts.zero_shares import (
    product_of_call,
    zero_rows_of_table,
    zeros_made_by,
)
from lm_profiler.measure.user_code import OURS, package_of, qualified_name, user_lines
from lm_profiler.record.operator_calls import (
    UNRECORDED_UPDATE,
    CausalMask,
    CodeLine,
    LayerCall,
    OperatorCall,
    PackedLengths,
    StepCalls,
)
from lm_profiler.torch_names import (
    BACKWARD_NODE,
    NEXT_NODE_NUMBER,
    NODE_NUMBER,
    WEIGHT_VERSION,
)

_LEAST_DOUBLE = 1 << 12  # smaller results of float64 are not noted
_LEAST_BROADCAST = 1 << 16  # smaller results of a broadcast are not noted
_BROADCAST_GROWTH = 16  # how many times more elements than its largest input holds
# namespaces of operators that change no arguments except those that their schema names
_PURE_NAMESPACES = ("aten", "prims")
_HOST_READS = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"}
# those of ``index_select``; others are masks
_INDEX_DTYPES = (torch.int32, torch.int64)
# the functions of Python that call autograd's engine; the program's lines inside of them are in hooks and Functions
_ENGINE = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)
_SLICES = ("aten::select", "aten::slice")
_DYNAMIC_SHAPE = torch.Tag.dynamic_output_shape
_RANDOM = torch.Tag.nondeterministic_seeded
# methods by which Python reads the elements of a tensor without calling an operator
_READING_METHODS = ("numpy", "tolist", "__array__", "__dlpack__", "data_ptr")
# torch's code between an operator and the function that runs it, if torch divides the operator into others
_FILE_OF_OPERATORS = getfile(type(torch.ops))
_DIMENSIONS_OF_SEQUENCES = 3  # batch, elements and features, in this or another order
_FILE_OF_CELLS = nn.LSTMCell.forward.__code__.co_filename
_OTHER = "other"
_FORWARD = "forward"
_OPTIMIZER = "optimizer"
_MOST_CALLS = 200_000  # a step with more is not recorded


class _TensorState(NamedTuple):
    """The storage of a tensor, and how often its content was changed in place."""

    storage: int
    version: int


class _ParameterState(NamedTuple):
    """A parameter and its gradient at one moment."""

    weight: _TensorState
    checksum: int | None  # of the elements of the weight; None if they cannot be read
    gradient: _TensorState | None

    def has_weight_of(self, earlier: _ParameterState) -> bool:
        """Return whether the weight is the same as in the ``earlier`` state."""
        return self.weight == earlier.weight and self.checksum == earlier.checksum


@dataclass(slots=True)
class _StepState:
    """What is known of the running step. Storages are given by their numbers."""

    values: ValueNumbers
    calls: list[OperatorCall] = field(default_factory=list)
    # the number of the values of a mask of attention to its number of positions if it is causal, else to 0
    causal_lengths: dict[int, int] = field(default_factory=dict)
    # the number of an autograd node to the number of the call that made it
    forward_by_node: dict[int, int] = field(default_factory=dict)
    last_forward_node: int = -1  # the number of the last node that forward has made

    # storages that code between the recorded parts of the step may have read
    exposed_storages: set[int] = field(default_factory=set)
    # the storages of parameters, and of what recorded calls of the step have written
    known_storages: set[int] = field(default_factory=set)
    # the storages of the tensors that modules had when the step began
    module_storages: set[int] = field(default_factory=set)

    # the identity of a parameter to the storage of its gradient when the step began
    first_gradients: dict[int, int] = field(default_factory=dict)
    # by their identity, the tensors that require a gradient of their own but are no parameters, such as an input
    other_leaves: dict[int, ref[Tensor]] = field(default_factory=dict)
    # whether forward reads a tensor from before the step that requires a gradient and is no parameter
    has_gradients_of_inputs: bool = False

    # Sparse tensors have no storage of their own, so it is unknown who reads their elements.
    has_sparse_tensors: bool = False
    # by their identity, the sparse matrices whose values the step computes
    computed_matrices: dict[int, ref[Tensor]] = field(default_factory=dict)

    # the trained parameters as the last recorded part left them; None while a part is recorded
    left_parameters: list[_ParameterState] | None = None


class StepOperators:
    """Records the calls of operators until ``take``; ``FlopCounter`` passes each call to ``note_call``.

    Args:
        parties: returns the model and its optimizers; called once they exist.
        wait: waits for the device, so that an operator's time is that of its kernels.
        clock: returns nanoseconds.
        sees_all: whether only recorded calls read results; sending gradients to other ranks, for example, is not
            recorded.
        report: receives the note that the step could not be recorded, with the reason.
    """

    def __init__(
        self,
        parties: Callable[[], tuple[nn.Module, Sequence[Optimizer]]],
        wait: Callable[[], object] = lambda: None,
        clock: Callable[[], int] = time.perf_counter_ns,
        sees_all: bool = True,
        report: Callable[[str], object] = lambda note: None,
    ) -> None:
        self.phase = _OTHER  # the phase that runs; ``StepFlops`` keeps it up to date
        self._parties = parties
        self._wait = wait
        self.clock = clock
        self._sees_all = sees_all
        self.guard = Guard("the data flow of a step", report, self.stop)
        self._storages = StorageNumbers()
        self._trials = OperatorTrials(clock)
        self._step = _StepState(ValueNumbers(self._storages))
        self._undo = ExitStack()
        self._thread = threading.get_ident()

    # -- while the step runs -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to note when Python reads the elements of a tensor."""
        self._undo.enter_context(_noted_reading(self.guard.wrap(self._note_host_read)))

    def begin_step(self) -> None:
        """Forget the previous step; note the gradients that it left, and the tensors of modules."""
        module, _ = self._parties()
        step = _StepState(ValueNumbers(self._storages))
        step.first_gradients = self._gradient_storages(module)
        step.known_storages = self._storages.of_all(module.parameters())
        step.module_storages = self._storages.of_all(_tensors_of_modules(module))
        for buffer in module.buffers():
            step.values.note_constant(self._storages.number_of(buffer))
        self._step = step

    def stop(self) -> None:
        """Restore torch's methods."""
        self._undo.close()

    def end_part(self) -> None:
        """Note that code runs now whose operators are not recorded: it may read all tensors that still exist."""
        module, _ = self._parties()
        gradients = set(self._gradient_storages(module).values())
        self._step.exposed_storages |= self._storages.alive() - gradients
        self._step.left_parameters = self._states_of_parameters()

    def begin_part(self) -> None:
        """Note what the code before this recorded part has done to the trained parameters and their gradients.

        Code whose operators are not recorded may use gradients in place of an optimizer: to update or perturb weights
        (sharpness-aware minimization, meta-learning), or to combine the gradients of several passes (differential
        privacy). It then changes weights, or clears all gradients although no optimizer has used them.
        """
        states_before = self._step.left_parameters
        self._step.left_parameters = None
        if states_before is None:
            return
        states = list(zip(states_before, self._states_of_parameters(), strict=False))
        # storages, in order; several parameters may share one
        weights = dict.fromkeys(before.weight.storage for before, _ in states)
        gradients: list[int] = []
        is_any_gradient_left = False
        for before, after in states:
            if before.gradient is not None:
                gradients.append(before.gradient.storage)
                if before.gradient == after.gradient:
                    is_any_gradient_left = True
        are_gradients_lost = bool(gradients) and not is_any_gradient_left
        has_used_gradients = are_gradients_lost and not self._is_backward_used()
        are_weights_the_same = all(
            after.has_weight_of(before) for before, after in states
        )
        if are_weights_the_same and not has_used_gradients:
            return
        are_weights_known = all(after.checksum is not None for _, after in states)
        if not are_weights_the_same or not are_weights_known:
            self._step.values.forget(weights)
        self._note_unrecorded_update(gradients, list(weights))

    def _note_unrecorded_update(
        self, gradients: Sequence[int], weights: Sequence[int]
    ) -> None:
        """Record that code used ``gradients`` to update ``weights``; both are given by their storages."""
        self._step.calls.append(
            OperatorCall(
                name=UNRECORDED_UPDATE,
                phase=_OTHER,
                seconds=0.0,
                reads=tuple(gradients),
                writes=tuple(weights),
            )
        )

    def _is_backward_used(self) -> bool:
        """Return whether an optimizer has made a call since the last backward pass began."""
        for call in reversed(self._step.calls):
            if call.phase == _OPTIMIZER:
                return True
            if call.phase == _FORWARD:
                return False
        return False

    def _states_of_parameters(self) -> list[_ParameterState]:
        """Return the state of each parameter that an optimizer updates."""
        _, optimizers = self._parties()
        states = []
        checksums: dict[int, int | None] = {}  # by storage, which many may share
        for parameter in _updated_parameters(optimizers):
            if parameter.layout is not torch.strided:
                continue
            weight = self._state_of(parameter)
            if weight.storage not in checksums:
                checksums[weight.storage] = checksum_of(parameter)
            gradient = parameter.grad
            gradient_state = None
            if gradient is not None and gradient.layout is torch.strided:
                gradient_state = self._state_of(gradient)
            states.append(
                _ParameterState(
                    weight=weight,
                    checksum=checksums[weight.storage],
                    gradient=gradient_state,
                )
            )
        return states

    def _state_of(self, tensor: Tensor) -> _TensorState:
        """Return the storage of ``tensor`` and its version; 0 for an inference tensor, which has none."""
        version = 0
        if not tensor.is_inference():
            version = WEIGHT_VERSION.get_or(tensor, 0)
        return _TensorState(self._storages.number_of(tensor), version)

    def note_call(
        self,
        operator: Any,
        args: Any,
        kwargs: Any,
        result: Any,
        began_ns: int,
    ) -> None:
        """Record a call of ``operator``, which has just returned ``result``; skip calls that only make views.

        ``began_ns`` is when it was called.
        """
        self._wait()
        seconds = (self.clock() - began_ns) * 1e-9
        if len(self._step.calls) >= _MOST_CALLS:
            self.guard.disable(f"the step has more than {_MOST_CALLS:,} operators")
            return
        name = base_name(operator)
        call = TimedCall(name, operator, args, kwargs, result, seconds)
        arguments = call.arguments()
        inputs = dense_tensors(with_parts_of_sparse(arguments))
        result_leaves = [*leaves([result])]
        results = dense_tensors(with_parts_of_sparse(result_leaves))
        if has_sparse(arguments) or has_sparse(result_leaves):
            self._step.has_sparse_tensors = True
            self._note_sparse_results(arguments, result_leaves)
        self._note_gradients_required(inputs)

        access = self._access_of_call(operator, args, kwargs, inputs, results)
        self._step.known_storages |= access.written
        # If the number of elements of a result depends on values, Python reads that number.
        is_host_read = name in _HOST_READS or _DYNAMIC_SHAPE in operator.tags
        is_view = not access.written and not is_host_read
        if not is_view:
            self._step.calls.append(
                self._record_of(call, inputs, results, access, is_host_read)
            )
        elif name in _SLICES and inputs[0].requires_grad:
            self._note_slice(name, inputs[0], results)

    def _record_of(
        self,
        call: TimedCall,
        inputs: Sequence[Tensor],
        results: Sequence[Tensor],
        access: _Access,
        is_host_read: bool,
    ) -> OperatorCall:
        """Return the record of a ``call`` that has just returned and is more than a view."""
        name = call.name
        args = call.args
        forward = self._forward_call()
        self._note_autograd_node()
        # Of an optimizer's calls only reads and writes matter. Finding their lines and values would take a third of
        # the time of recording.
        is_of_model = self.phase != _OPTIMIZER
        lines = self._lines_of_call(forward) if is_of_model else ()
        recurrent = _running_recurrent() if is_of_model else None
        cell = recurrent if _is_cell(recurrent) else None
        value, is_constant = self._step.values.add_call(
            call.operator,
            with_parts_of_sparse(call.arguments()),
            written=sorted(access.written),
            is_deterministic=is_of_model and _is_deterministic(call.operator),
        )
        has_sequence_kernel = False
        layer_call: LayerCall | None = None
        if cell is not None:
            has_sequence_kernel = _has_sequence_kernel(cell.module, inputs)
            layer_call = self._layer_call(cell)
        largest_result = max(results, key=Tensor.numel, default=None)
        result_elements = 0 if largest_result is None else largest_result.numel()
        input_elements = max(map(Tensor.numel, inputs), default=0)
        made_zero_elements, made_zero_rows = 0.0, 0.0
        if forward is not None:
            made_zero_elements, made_zero_rows = zeros_made_by(
                name, args, largest_result
            )
        return OperatorCall(
            name=name,
            phase=self.phase,
            seconds=call.seconds,
            reads=tuple(access.read),
            writes=tuple(access.written),
            overwrites=frozenset(access.overwritten | access.made),
            lines=lines,
            syntax_line=_syntax_line() if is_of_model else None,
            forward=forward,
            value=value,
            is_constant=is_constant,
            is_host_read=is_host_read,
            elements=result_elements,
            first_elements=inputs[0].numel() if inputs else 0,
            size=max(input_elements, result_elements),
            broadcasts=_broadcasts(call.operator, inputs, largest_result),
            broadcasts_missing_dimensions=_have_different_dimensions(inputs),
            makes_double=_makes_double(largest_result),
            multiplies_by_zero=_multiplies_by_zero(name, args),
            is_of_cell=cell is not None,
            is_of_recurrent_layer=_is_layer(recurrent),
            packed_lengths=_packed_lengths(recurrent),
            has_sequence_kernel=has_sequence_kernel,
            layer_call=layer_call,
            linear_map=linear_map_of_call(
                name, args, call.result, self._step.values.number_of
            ),
            added=frozenset(
                self._storages.of_all(
                    tensors_added_elementwise(name, inputs, call.result)
                )
            ),
            product=product_of_call(name, args, self._storages),
            indexed_row_elements=_indexed_row_elements(name, args),
            has_transposed_logits=_has_transposed_logits(name, args),
            causal_mask=self._causal_mask(name, inputs),
            has_half_input=has_half_input(inputs),
            float32_share=float32_share(call, self._trials),
            channels_last_share=channels_last_share(call, self._trials),
            linear_share=linear_share(call, self._trials),
            fourier_share=fourier_share(call, self._trials),
            is_sparse_product=is_sparse_product(call),
            csr_share=self._csr_share(call),
            zero_rows=zero_rows_of_table(name, largest_result),
            made_zero_elements=made_zero_elements,
            made_zero_rows=made_zero_rows,
        )

    def _note_gradients_required(self, inputs: Sequence[Tensor]) -> None:
        """Note which ``inputs`` of a call require a gradient although they are no parameters, such as a batch."""
        for tensor in inputs:
            if not tensor.requires_grad:
                continue
            if tensor.is_leaf and not isinstance(tensor, nn.Parameter):
                self._step.other_leaves[id(tensor)] = ref(tensor)
            if self.phase == _FORWARD:
                storage = self._storages.number_of(tensor)
                if storage not in self._step.known_storages:
                    self._step.has_gradients_of_inputs = True

    def _note_sparse_results(
        self, arguments: Sequence[Any], results: Sequence[Any]
    ) -> None:
        """Note the sparse matrices that a call returns, if the step computes their values.

        A matrix that is made of other sparse matrices alone, for example by transposing one, is the same in each step
        if these are.
        """
        sources = sparse_matrices(arguments)
        has_only_sparse_sources = bool(sources) and not dense_tensors(arguments)
        if not has_only_sparse_sources or self._is_any_computed(sources):
            for matrix in sparse_matrices(results):
                self._step.computed_matrices[id(matrix)] = ref(matrix)

    def _is_any_computed(self, matrices: Sequence[Tensor]) -> bool:
        """Return whether the step computes the values of any of the sparse ``matrices``."""
        for matrix in matrices:
            reference = self._step.computed_matrices.get(id(matrix))
            if reference is not None and reference() is matrix:
                return True
        return False

    def _csr_share(self, call: TimedCall) -> float | None:
        """Return the share of a product's time with its sparse matrix in CSR; None if the step computes that matrix."""
        if self._is_any_computed(sparse_matrices(leaves(call.args))):
            return None
        return csr_share(call, self._trials)

    def _causal_mask(self, name: str, inputs: Sequence[Tensor]) -> CausalMask | None:
        """Return the mask of a call of fused attention if it is causal; None for other masks and calls."""
        mask = mask_of_attention(name, inputs)
        if mask is None:
            return None
        # Searching a large mask takes a second, and all layers may get the same one.
        values = self._step.values.number_of(mask)
        if values not in self._step.causal_lengths:
            self._step.causal_lengths[values] = causal_length(mask)
        length = self._step.causal_lengths[values]
        if length == 0:
            return None
        return CausalMask(self._storages.number_of(mask), length)

    def _layer_call(self, cell: _Recurrent) -> LayerCall | None:
        """Return the call of a recurrent layer that runs; None for cells, and for a bidirectional layer.

        A bidirectional layer that gets one element at a time computes something else than with whole sequences.
        """
        layer = cell.module
        states = cell.frame.f_locals.get("hx")
        if not isinstance(layer, nn.RNNBase) or layer.bidirectional or states is None:
            return None
        state_storages = self._storages.of_all(dense_tensors([*leaves([states])]))
        return LayerCall(
            layer=id(layer),
            inputs=self._storages.number_of(cell.frame.f_locals["input"]),
            states=tuple(sorted(state_storages)),
        )

    def _note_slice(self, name: str, whole: Tensor, slices: Sequence[Tensor]) -> None:
        """Record the call that takes ``slices`` of ``whole``; their gradient is as large as ``whole``.

        It computes nothing, but backward computes that gradient in a call that belongs to it. All other fields keep
        their defaults.
        """
        forward = self._forward_call()
        self._note_autograd_node()
        self._step.calls.append(
            OperatorCall(
                name=name,
                is_view=True,
                packed_lengths=_packed_lengths(_running_recurrent()),
                phase=self.phase,
                seconds=0.0,
                reads=(self._storages.number_of(whole),),
                writes=(),
                lines=self._lines_of_call(forward),
                forward=forward,
                elements=sum(map(Tensor.numel, slices)),
            )
        )

    def _access_of_call(
        self,
        operator: Any,
        args: Any,
        kwargs: Any,
        inputs: Sequence[Tensor],
        results: Sequence[Tensor],
    ) -> _Access:
        """Return which storages a call reads and writes."""
        input_storages = self._storages.of_all(inputs)
        changed = self._storages.of_all(changed_arguments(operator, args, kwargs))
        if operator.namespace not in _PURE_NAMESPACES:
            # An operator that is not torch's own may change arguments that its schema does not name.
            changed = changed | input_storages
        overwritten = self._storages.of_all(overwritten_inputs(operator, inputs))
        return _Access(
            read=input_storages - overwritten,
            changed=changed,
            made=self._storages.of_all(results) - input_storages,
            overwritten=overwritten,
        )

    def _forward_call(self) -> int | None:
        """Return the number of the call whose backward pass runs; None in forward, or if the call is unknown."""
        node = BACKWARD_NODE.find()()
        if node is None:
            return None
        return self._step.forward_by_node.get(int(NODE_NUMBER.get(node)()))

    def _note_autograd_node(self) -> None:
        """Note that the call that is recorded next has made the newest autograd node.

        With create_graph, backward makes nodes, too.
        """
        last_node_number = NEXT_NODE_NUMBER.find()() - 1
        is_of_forward = BACKWARD_NODE.find()() is None
        was_made_in_backward = last_node_number > self._step.last_forward_node
        if is_of_forward or was_made_in_backward:
            # The first call after a node was made is the one that made it; later calls may run without gradients. A
            # view makes a node without a call: no call of backward has made it.
            self._step.forward_by_node.setdefault(
                last_node_number, len(self._step.calls)
            )
        if is_of_forward:
            self._step.last_forward_node = last_node_number

    def _lines_of_call(self, forward: int | None) -> tuple[CodeLine, ...]:
        """Return the lines of the program that led to the call.

        In the phase backward, if the ``forward`` call is known, only the lines of hooks and autograd Functions: the
        line of ``loss.backward()`` leads to all calls. A ``torch.autograd.grad`` in a loss is not in that phase, so
        its line is kept.
        """
        is_of_known_call = forward is not None and self.phase == "backward"
        inside = _ENGINE if is_of_known_call else ()
        lines = user_lines(sys._getframe(1), inside)
        return tuple(CodeLine(*line) for line in lines)

    def _note_host_read(self, tensor: Tensor) -> None:
        """Record that Python reads the elements of ``tensor``."""
        if threading.get_ident() != self._thread:
            return
        storage = self._storages.number_of(tensor)
        self._step.calls.append(
            OperatorCall(
                name="host read",
                phase=self.phase,
                seconds=0.0,
                reads=(storage,),
                writes=(),
                is_host_read=True,
            )
        )

    # -- when the step has ended ---------------------------------------------------------------------------------------

    def take(self, is_complete: bool) -> StepCalls | None:
        """Return the step that ends; None if it could not be recorded.

        ``is_complete`` is whether all kernels of the step came from operators.
        """
        if self.guard.is_disabled or not self._step.calls:
            return None
        module, optimizers = self._parties()
        updated = _updated_parameters(optimizers)
        gradients = self._gradient_storages(module)
        kept = self._step.exposed_storages | self._storages.alive()
        # A gradient that is left counts only if the next step adds to it.
        kept -= set(gradients.values())
        kept |= self._accumulated_storages(gradients)
        kept -= self._gradients_of_other_leaves(updated)
        return StepCalls(
            calls=self._step.calls,
            trained=frozenset(self._storages.of_all(updated)),
            of_modules=frozenset(self._step.module_storages),
            kept=frozenset(kept),
            is_complete=is_complete
            and self._sees_all
            and not self._step.has_sparse_tensors,
            trained_elements=sum(parameter.numel() for parameter in updated),
            has_gradients_of_inputs=self._step.has_gradients_of_inputs,
            is_double=any(parameter.dtype == torch.float64 for parameter in updated),
        )

    def _gradient_storages(self, module: nn.Module) -> dict[int, int]:
        """Return the storages of the dense gradients, by the identity of their parameters."""
        storages = {}
        for parameter in module.parameters():
            gradient = parameter.grad
            if gradient is not None and gradient.layout is torch.strided:
                storages[id(parameter)] = self._storages.number_of(gradient)
        return storages

    def _gradients_of_other_leaves(self, updated: Sequence[Tensor]) -> set[int]:
        """Return the storages of gradients that belong to tensors which are no parameters, and which nothing updates.

        The program keeps such a tensor, and its gradient with it, as long as it keeps the outputs of the model.
        """
        updated_tensors = {id(parameter) for parameter in updated}
        storages: set[int] = set()
        for identity, reference in self._step.other_leaves.items():
            leaf = reference()
            gradient = None if leaf is None else leaf.grad
            if gradient is None or identity in updated_tensors:
                continue
            # then the program holds the gradient itself, and not only the tensor
            is_kept_itself = sys.getrefcount(gradient) > _references_to_gradient()
            if gradient.layout is torch.strided and not is_kept_itself:
                storages.add(self._storages.number_of(gradient))
        return storages

    def _accumulated_storages(self, gradients: dict[int, int]) -> set[int]:
        """Return the storages of the ``gradients`` that the next step will read and add to.

        They are those of the parameters whose earlier gradient this step has read.
        """
        read: set[int] = set()
        for call in self._step.calls:
            read.update(call.reads)
        accumulated: set[int] = set()
        for parameter, storage in gradients.items():
            if self._step.first_gradients.get(parameter) in read:
                accumulated.add(storage)
        return accumulated


class _Access(NamedTuple):
    """The numbers of the storages that a call reads and writes."""

    read: set[int]
    changed: set[int]  # storages of arguments that the call changes
    made: set[int]  # storages of results that are not views of arguments
    overwritten: set[int]  # those of ``changed`` whose earlier content is not read

    @property
    def written(self) -> set[int]:
        return self.changed | self.made


@cache
def _references_to_gradient() -> int:
    """Return how many references ``sys.getrefcount`` counts for a gradient that only its tensor holds.

    It depends on the version of torch, which may hold one itself.
    """
    leaf = torch.zeros(1, requires_grad=True)
    leaf.grad = torch.zeros(1)
    gradient = leaf.grad
    return sys.getrefcount(gradient)


def _tensors_of_modules(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of ``module``, and the tensors that it and its parts have as attributes."""
    attributes: list[Any] = []
    for part in module.modules():
        attributes.extend(vars(part).values())
    return dense_tensors([*module.parameters(), *module.buffers(), *attributes])


def _updated_parameters(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the parameters that ``optimizers`` update."""
    parameters: list[Tensor] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            parameters.extend(group["params"])
    return parameters


def _is_deterministic(operator: Any) -> bool:
    """Return whether equal arguments give equal results: of torch's own operators without random numbers."""
    return operator.namespace in _PURE_NAMESPACES and _RANDOM not in operator.tags


def _broadcasts(
    operator: Any, inputs: Sequence[Tensor], largest_result: Tensor | None
) -> bool:
    """Return whether a call makes a large tensor from two or more that hold far fewer elements."""
    if largest_result is None or largest_result.numel() < _LEAST_BROADCAST:
        return False
    if len(inputs) < 2 or torch.Tag.pointwise not in operator.tags:
        return False
    # A tensor that ``expand`` has made holds no more elements than its storage.
    elements_held = [min(tensor.numel(), stored_elements(tensor)) for tensor in inputs]
    return largest_result.numel() >= _BROADCAST_GROWTH * max(elements_held)


def _have_different_dimensions(tensors: Sequence[Tensor]) -> bool:
    """Return whether the ``tensors`` differ in their number of dimensions."""
    return len({tensor.dim() for tensor in tensors}) > 1


def _multiplies_by_zero(name: str, args: Sequence[Any]) -> bool:
    """Return whether a call multiplies a tensor by the number 0, and writes to none of its arguments."""
    if name != "aten::mul":
        return False
    return any(isinstance(factor, (int, float)) and factor == 0 for factor in args)


def _indexed_row_elements(name: str, args: Sequence[Any]) -> int:
    """Return how many elements a row has that ``x[index]`` copies on the CPU; 0 for other calls.

    ``index_select`` can replace it if the index is one vector of integers. A row is the elements behind the indexed
    dimension.
    """
    if name != "aten::index" or args[0].device.type != "cpu":
        return 0
    indexed, indices = args[:2]
    dimensions = [
        dimension for dimension, index in enumerate(indices) if index is not None
    ]
    if len(dimensions) != 1:
        return 0
    (dimension,) = dimensions
    index = indices[dimension]
    is_vector_of_numbers = index.dim() == 1 and index.dtype in _INDEX_DTYPES
    if not is_vector_of_numbers:
        return 0
    return math.prod(indexed.shape[dimension + 1 :])


def _has_transposed_logits(name: str, args: Sequence[Any]) -> bool:
    """Return whether a softmax on the CPU is over the second of three dimensions, which is the last one in memory."""
    if name != "aten::_log_softmax":
        return False
    logits, dimension = args[:2]
    is_over_classes = logits.dim() == 3 and dimension in (1, -2)
    is_on_cpu = logits.device.type == "cpu"
    return is_over_classes and is_on_cpu and logits.stride(1) == 1


def _has_sequence_kernel(cell: nn.Module, inputs: Sequence[Tensor]) -> bool:
    """Return whether the layer for whole sequences of a recurrent ``cell`` is faster than the cell.

    On a GPU all of them have a fused kernel (cuDNN, MIOpen). On the CPU only the LSTM in float32 has one (oneDNN). The
    other layers call the same operators there as their cells.
    """
    if not inputs or not isinstance(cell, nn.RNNCellBase):
        return False
    if inputs[0].device.type != "cpu":
        return True
    is_lstm = isinstance(cell, nn.LSTMCell)
    return is_lstm and inputs[0].dtype == torch.float32 and mkldnn.is_available()


def _syntax_line() -> CodeLine | None:
    """Return the program's line that runs an operator without calling a function; None if a call runs it."""
    for frame, line in walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        package = package_of(file)
        if package == OURS or file == _FILE_OF_OPERATORS:
            continue
        if package or _runs_call(frame):
            return None
        return CodeLine(file, line, qualified_name(_outer_function(frame).f_code))
    return None


def _runs_call(frame: FrameType) -> bool:
    """Return whether the instruction that ``frame`` runs is the call of a function."""
    instructions = _instructions_of(frame.f_code)
    return opname[instructions[frame.f_lasti]].startswith("CALL")


@cache
def _instructions_of(code: CodeType) -> bytes:
    """Return the instructions of ``code``; Python makes a new copy for each access."""
    return code.co_code


def _outer_function(frame: FrameType) -> FrameType:
    """Return the function that contains the lambda or comprehension that ``frame`` runs, or else ``frame``."""
    outer = frame
    while outer.f_code.co_name.startswith("<") and outer.f_back is not None:
        outer = outer.f_back
    return frame if package_of(outer.f_code.co_filename) else outer


class _Recurrent(NamedTuple):
    """A recurrent cell or layer of torch whose forward pass runs, and the frame of its ``forward``."""

    module: nn.Module
    frame: FrameType


def _running_recurrent() -> _Recurrent | None:
    """Return torch's recurrent cell or layer whose ``forward`` makes the present call of an operator.

    None if other code makes it, including code of the program that runs within such a ``forward``.
    """
    for frame, _ in walk_stack(sys._getframe(1)):
        code = frame.f_code
        if code.co_filename == _FILE_OF_CELLS and code.co_name == "forward":
            module = frame.f_locals.get("self")
            if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
                return _Recurrent(module, frame)
            return None
        if not package_of(code.co_filename):
            return None  # a line of the program
    return None


def _is_cell(recurrent: _Recurrent | None) -> bool:
    """Return whether a cell runs; a layer for whole sequences that gets a single element is used as a cell."""
    if recurrent is None:
        return False
    layer = recurrent.module
    if isinstance(layer, nn.RNNBase):
        return _has_single_element(layer, recurrent.frame)
    return True


def _is_layer(recurrent: _Recurrent | None) -> bool:
    return recurrent is not None and isinstance(recurrent.module, nn.RNNBase)


def _packed_lengths(recurrent: _Recurrent | None) -> PackedLengths | None:
    """Return whether the packed sequences that a layer gets are equally long; None if it gets no packed sequences."""
    if recurrent is None:
        return None
    # the number of sequences that have a first element, a second one, and so on
    batch_sizes = recurrent.frame.f_locals.get("batch_sizes")
    if not isinstance(batch_sizes, Tensor):
        return None
    have_one_length = int(batch_sizes[0]) == int(batch_sizes[-1])
    return "equal" if have_one_length else "different"


def _has_single_element(layer: nn.RNNBase, frame: FrameType) -> bool:
    """Return whether the sequences have one element that ``layer`` gets in its forward pass, which ``frame`` runs."""
    sequences = frame.f_locals.get("input")
    if not isinstance(sequences, Tensor) or sequences.dim() != _DIMENSIONS_OF_SEQUENCES:
        return False  # packed sequences of different lengths
    length_dimension = 1 if layer.batch_first else 0
    return sequences.shape[length_dimension] == 1


def _makes_double(largest_result: Tensor | None) -> bool:
    """Return whether the result of a call is a large tensor of float64."""
    if largest_result is None or largest_result.numel() < _LEAST_DOUBLE:
        return False
    return largest_result.dtype in (torch.float64, torch.complex128)


@contextmanager
def _noted_reading(note: Callable[[Tensor], object]) -> Iterator[None]:
    """Make the methods by which Python reads a tensor's elements call ``note`` first."""
    with ExitStack() as stack:
        for name in _READING_METHODS:
            noting_method = _noting_method(name, note)
            stack.enter_context(replaced_method(Tensor, name, noting_method))
        yield


def _noting_method(
    name: str, note: Callable[[Tensor], object]
) -> Callable[..., object]:
    """Return the method ``name`` of Tensor, preceded by a call of ``note``."""
    method = getattr(Tensor, name)

    @wraps(method)
    def noting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        note(tensor)
        return method(tensor, *args, **kwargs)

    return noting
