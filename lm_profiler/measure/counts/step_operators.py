"""Records the operators of one step as calls that read and write storages, for ``analysis.dataflow``.

Keeps no tensor alive. Values are numbered by the operators that make them; only factors of matrix products are looked
at, for zeros.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from itertools import chain
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lm_profiler.measure.boundary import Guard
from lm_profiler.measure.user_code import user_lines
from lm_profiler.record.operator_calls import (
    CodeLine,
    Operand,
    OperatorCall,
    Product,
    StepCalls,
)
from lm_profiler.torch_names import (
    BACKWARD_NODE,
    NEXT_NODE_NUMBER,
    NODE_NUMBER,
    OPERATOR_SCHEMA,
)

# the factors of operators that are matrix products, by their positions
_FACTORS = {
    "aten::mm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::bmm": (0, 1),
    "aten::baddbmm": (1, 2),
}
_LEAST_FACTOR = 1 << 12  # elements: smaller factors are not searched for zeros
_LEAST_DOUBLE = 1 << 12  # elements of a result of float64 that are worth a look
_LEAST_BROADCAST = 1 << 16  # elements of its result
_BROADCAST_GROWTH = 16  # how many times more elements than its largest input holds
# of operators that change no argument but those that their schema names
_PURE_NAMESPACES = ("aten", "prims")
_HOST_READS = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"}
# operators that write all elements of their first argument, and read none
_FILLS = {"aten::zero_", "aten::fill_", "aten::copy_", "aten::_foreach_zero_"}
# functions that call autograd's engine: a line of the program inside of them is of a hook, or of a Function
_ENGINE = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)
_DYNAMIC_SHAPE = torch.Tag.dynamic_output_shape
_RANDOM = torch.Tag.nondeterministic_seeded
# methods by which Python reads the elements of a tensor, past torch's operators
_READING_METHODS = ("numpy", "tolist", "__array__", "__dlpack__", "data_ptr")
_OTHER, _OPTIMIZER = "other", "optimizer"
_MOST_CALLS = 200_000  # of a step that are recorded: a longer one is not judged


class StepOperators:
    """Records the calls of operators until ``take``; ``FlopCounter`` shows them to it.

    Args:
        parties: returns the model and its optimizers; called once they exist.
        wait: waits for the device, so that an operator's time is that of its kernels.
        clock: returns nanoseconds.
        sees_all: whether nothing else reads results, such as what sends gradients to other ranks.
        report: gets the note that the step could not be recorded, and why.
    """

    def __init__(
        self,
        parties: Callable[[], tuple[nn.Module, Sequence[Optimizer]]],
        wait: Callable[[], object] = lambda: None,
        clock: Callable[[], int] = time.perf_counter_ns,
        sees_all: bool = True,
        report: Callable[[str], object] = lambda note: None,
    ) -> None:
        self.phase = _OTHER  # that runs, as ``StepFlops`` notes
        self._parties = parties
        self._wait = wait
        self.clock = clock
        self._sees_all = sees_all
        self.guard = Guard("the data flow of a step", report, self.stop)
        self._calls: list[OperatorCall] = []
        self._numbers = _StorageNumbers()
        self._values = _Values()
        self._forward_by_node: dict[int, int] = {}
        self._kept: set[int] = set()
        # of parameters, by their identity: the storage of the gradient that the step before has left
        self._first_gradients: dict[int, int] = {}
        # whether a tensor had no storage of its own, so that it is not known who reads what it holds
        self._has_sparse_tensors = False
        self._undo = ExitStack()
        self._thread = threading.get_ident()

    # -- while the step runs -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin: have Python's reading of tensors noted."""
        self._undo.enter_context(_noted_reading(self.guard.wrap(self._note_host_read)))

    def begin_step(self) -> None:
        """Forget the step before, and note the gradients that it has left, and the buffers."""
        self._calls = []
        self._values = _Values()
        self._forward_by_node = {}
        self._kept = set()
        self._has_sparse_tensors = False
        module, _ = self._parties()
        self._first_gradients = self._gradient_storages(module)
        for buffer in module.buffers():
            self._values.note_constant(self._numbers.number_of(buffer))

    def stop(self) -> None:
        """Leave torch's methods as they were."""
        self._undo.close()

    def part_ended(self) -> None:
        """Note what code may read that is not seen, because a part of the step that is seen has ended."""
        module, _ = self._parties()
        gradients = set(self._gradient_storages(module).values())
        self._kept |= self._numbers.alive() - gradients

    def note_call(
        self,
        operator: Any,
        args: Any,
        kwargs: Any,
        result: Any,
        began_ns: int,
    ) -> None:
        """Record a call of ``operator``, which has just returned ``result``."""
        self._wait()
        seconds = (self.clock() - began_ns) * 1e-9
        if len(self._calls) >= _MOST_CALLS:
            self.guard.disable(f"the step has more than {_MOST_CALLS:,} operators")
            return
        name = operator.name().partition(".")[0]
        arguments = [*_leaves(args), *_leaves(kwargs.values())]
        result_leaves = [*_leaves([result])]
        results = _tensors(result_leaves)
        if _has_sparse([*arguments, *result_leaves]):
            self._has_sparse_tensors = True
        access = self._access(operator, args, kwargs, arguments, results)
        # Python sees how many elements a result has, where that depends on values.
        is_host_read = name in _HOST_READS or _DYNAMIC_SHAPE in operator.tags
        is_view = not access.changed and not access.made and not is_host_read
        if is_view:
            return

        forward = self._forward_call()
        # What an optimizer computes is its own business: only who reads what counts, which takes a third of the time.
        is_of_model = self.phase != _OPTIMIZER
        value, is_constant = self._values.add_call(
            operator,
            arguments,
            storages=self._numbers,
            written=sorted(access.changed | access.made),
            is_known=is_of_model and _computes_from_arguments(operator),
        )
        largest = max(results, key=Tensor.numel, default=None)
        self._calls.append(
            OperatorCall(
                name=name,
                phase=self.phase,
                seconds=seconds,
                reads=tuple(access.read),
                writes=tuple(access.changed | access.made),
                overwrites=frozenset(access.overwritten | access.made),
                lines=self._lines(forward) if is_of_model else (),
                forward=forward,
                value=value,
                is_constant=is_constant,
                is_host_read=is_host_read,
                elements=0 if largest is None else largest.numel(),
                size=max(
                    map(Tensor.numel, chain(_tensors(arguments), results)), default=0
                ),
                broadcasts=_broadcasts(operator, _tensors(arguments), largest),
                makes_double=_makes_double(largest),
                product=self._product(name, args),
                zero_rows=_zero_rows_of_table(name, largest),
            )
        )

    def _access(
        self,
        operator: Any,
        args: Any,
        kwargs: Any,
        arguments: Iterable[Any],
        results: Sequence[Tensor],
    ) -> _Access:
        """Return what a call does to storages. An operator that is not torch's own may change all that it gets."""
        inputs = _tensors(arguments)
        input_storages = self._numbers.of_all(inputs)
        changed = self._numbers.of_all(_changed_arguments(operator, args, kwargs))
        if operator.namespace not in _PURE_NAMESPACES:
            changed = changed | input_storages
        overwritten = self._numbers.of_all(_filled(operator, inputs))
        return _Access(
            read=input_storages - overwritten,
            changed=changed,
            made=self._numbers.of_all(results) - input_storages,
            overwritten=overwritten,
        )

    def _forward_call(self) -> int | None:
        """Return the number of the call whose backward pass runs; None in forward, which notes the next call's node."""
        node = BACKWARD_NODE.find()()
        if node is not None:
            return self._forward_by_node.get(int(NODE_NUMBER.get(node)()))
        last_node_number = NEXT_NODE_NUMBER.find()() - 1
        # The first call since a node was made is its own; further ones may be without gradients.
        self._forward_by_node.setdefault(last_node_number, len(self._calls))
        return None

    def _lines(self, forward: int | None) -> tuple[CodeLine, ...]:
        """Return the program's lines that led here; of a known ``forward`` call's backward pass only those in hooks."""
        inside = () if forward is None else _ENGINE
        lines = user_lines(sys._getframe(2), inside)
        return tuple(CodeLine(*line) for line in lines)

    def _note_host_read(self, tensor: Tensor) -> None:
        """Record that Python reads the elements of ``tensor``."""
        if threading.get_ident() != self._thread:
            return
        storage = self._numbers.number_of(tensor)
        self._calls.append(
            OperatorCall(
                name="host read",
                phase=self.phase,
                seconds=0.0,
                reads=(storage,),
                writes=(),
                is_host_read=True,
            )
        )

    def _product(self, name: str, args: Any) -> Product | None:
        """Return the matrix product that a call is, if it is one of dense matrices that are worth a look."""
        positions = _FACTORS.get(name)
        if positions is None:
            return None
        left, right = (args[position] for position in positions)
        if left.layout is not torch.strided or right.layout is not torch.strided:
            return None
        batch = left.shape[0] if left.dim() == 3 else 1
        return Product(batch, self._operand(left), self._operand(right))

    def _operand(self, factor: Tensor) -> Operand:
        rows, columns = factor.shape[-2:]
        operand = Operand(self._numbers.number_of(factor), rows, columns)
        is_searched = factor.numel() >= _LEAST_FACTOR and factor.is_floating_point()
        return _with_zeros(operand, factor) if is_searched else operand

    # -- when it is over -----------------------------------------------------------------------------------------------

    def take(self, is_complete: bool) -> StepCalls | None:
        """Return the step that ends; None if it could not be recorded.

        ``is_complete`` is whether all kernels of the step came from operators.
        """
        if self.guard.is_disabled or not self._calls:
            return None
        module, optimizers = self._parties()
        updated = _updated_by(optimizers)
        gradients = self._gradient_storages(module)
        kept = self._kept | self._numbers.alive()
        kept -= set(gradients.values())
        kept |= self._accumulated(gradients)
        return StepCalls(
            calls=self._calls,
            trained=frozenset(
                self._numbers.number_of(parameter) for parameter in updated
            ),
            kept=frozenset(kept),
            is_complete=is_complete and self._sees_all and not self._has_sparse_tensors,
            trained_elements=sum(parameter.numel() for parameter in updated),
            is_double=any(parameter.dtype == torch.float64 for parameter in updated),
        )

    def _gradient_storages(self, module: nn.Module) -> dict[int, int]:
        """Return the storages of the dense gradients, by the identity of their parameters."""
        storages = {}
        for parameter in module.parameters():
            gradient = parameter.grad
            if gradient is not None and gradient.layout is torch.strided:
                storages[id(parameter)] = self._numbers.number_of(gradient)
        return storages

    def _accumulated(self, gradients: dict[int, int]) -> set[int]:
        """Return the ``gradients`` to which the next step adds, as this one has added to those that it found."""
        read: set[int] = set()
        for call in self._calls:
            read.update(call.reads)
        accumulated: set[int] = set()
        for parameter, storage in gradients.items():
            if self._first_gradients.get(parameter) in read:
                accumulated.add(storage)
        return accumulated


class _Access(NamedTuple):
    """The storages that a call reads and writes."""

    read: set[int]
    changed: set[int]  # arguments
    made: set[int]  # results that are no views of arguments
    overwritten: set[int]  # arguments whose content it does not read


class _StorageNumbers:
    """Numbers the storages of tensors; a new storage has a new number, also where a freed one was."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[ref[Any], int]] = {}  # by identity
        self._count = 0

    def number_of(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        known = self._numbers.get(id(storage))
        if known is not None and known[0]() is storage:
            return known[1]
        self._count += 1
        self._numbers[id(storage)] = (ref(storage), self._count)
        return self._count

    def of_all(self, tensors: Iterable[Tensor]) -> set[int]:
        return {self.number_of(tensor) for tensor in tensors}

    def alive(self) -> set[int]:
        """Return the numbers of the storages that still exist."""
        return {
            number
            for reference, number in self._numbers.values()
            if reference() is not None
        }


class _Values:
    """Numbers what storages hold and what calls compute: equal numbers mean equal values."""

    def __init__(self) -> None:
        self._number_by_key: dict[Any, int] = {}
        self._contents: dict[int, int] = {}  # by storage
        self._constants: set[int] = set()  # contents that are the same in each step
        self._count = 0

    def note_constant(self, storage: int) -> None:
        """Note that ``storage`` holds the same in each step, unless the step changes it."""
        self._constants.add(self._content_of(storage))

    def add_call(
        self,
        operator: Any,
        arguments: Iterable[Any],
        storages: _StorageNumbers,
        written: Sequence[int],
        is_known: bool,
    ) -> tuple[int | None, bool]:
        """Return the number of what a call computes, None if that is unknown, and whether it is a constant.

        Also note what it leaves in the storages that it changes, and in those that it makes.
        """
        parts: list[Any] = [operator]
        is_constant = is_known
        for leaf in arguments if is_known else ():
            if _is_dense(leaf):
                content = self._content_of(storages.number_of(leaf))
                is_constant = is_constant and content in self._constants
                parts.append(
                    (
                        content,
                        leaf.storage_offset(),
                        leaf.shape,
                        leaf.stride(),
                        leaf.dtype,
                    )
                )
            elif isinstance(leaf, _PLAIN_TYPES):
                parts.append((type(leaf), leaf))
            else:
                is_known = False
                is_constant = False
        number = self._number_of(tuple(parts)) if is_known else self._new_number()
        for position, storage in enumerate(written):
            content = self._number_of((number, position))
            self._contents[storage] = content
            if is_constant:
                self._constants.add(content)
        return (number if is_known else None), is_constant

    def _content_of(self, storage: int) -> int:
        content = self._contents.get(storage)
        if content is None:
            content = self._new_number()
            self._contents[storage] = content
        return content

    def _number_of(self, key: Any) -> int:
        number = self._number_by_key.get(key)
        if number is None:
            number = self._new_number()
            self._number_by_key[key] = number
        return number

    def _new_number(self) -> int:
        self._count += 1
        return self._count


# arguments that are equal if they are equal in Python
_PLAIN_TYPES = (
    bool,
    int,
    float,
    complex,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


def _updated_by(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the parameters that ``optimizers`` update."""
    return [
        parameter
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """Yield ``values``, and the elements of those that are lists: those of an operator nest no deeper."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def _is_dense(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided


def _tensors(leaves: Iterable[Any]) -> list[Tensor]:
    """Return those of ``leaves`` that are dense tensors."""
    return [leaf for leaf in leaves if _is_dense(leaf)]


def _has_sparse(leaves: Iterable[Any]) -> bool:
    return any(isinstance(leaf, Tensor) and not _is_dense(leaf) for leaf in leaves)


def _changed_arguments(operator: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the tensors that a call of ``operator`` changes."""
    changed_positions, changed_names = _changed_by(operator)
    for position in changed_positions:
        if position < len(args):
            yield from _tensors(_leaves([args[position]]))
    for name in changed_names:
        if name in kwargs:
            yield from _tensors(_leaves([kwargs[name]]))


@cache
def _changed_by(operator: Any) -> tuple[list[int], list[str]]:
    """Return the positions and the names of the arguments that ``operator`` changes."""
    positions = []
    names = []
    for position, argument in enumerate(OPERATOR_SCHEMA.get(operator).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            positions.append(position)
            names.append(argument.name)
    return positions, names


def _filled(operator: Any, inputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield those of ``inputs`` whose whole storage a call fills, without a look at what is there."""
    name = operator.name().partition(".")[0]
    if name not in _FILLS:
        return
    filled = inputs if name == "aten::_foreach_zero_" else inputs[:1]
    for tensor in filled:
        storage_elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        if tensor.numel() == storage_elements:
            yield tensor


def _computes_from_arguments(operator: Any) -> bool:
    """Return whether equal arguments have equal results: not of random numbers, and not of foreign operators."""
    return operator.namespace in _PURE_NAMESPACES and _RANDOM not in operator.tags


def _broadcasts(operator: Any, inputs: Sequence[Tensor], result: Tensor | None) -> bool:
    """Return whether a call broadcasts two tensors to one of far more elements than they hold.

    A tensor that ``expand`` has made holds no more elements than its storage.
    """
    is_large = result is not None and result.numel() >= _LEAST_BROADCAST
    if len(inputs) < 2 or not is_large or torch.Tag.pointwise not in operator.tags:
        return False
    assert result is not None
    elements_held = [
        min(tensor.numel(), tensor.untyped_storage().nbytes() // tensor.element_size())
        for tensor in inputs
    ]
    return result.numel() >= _BROADCAST_GROWTH * max(elements_held)


def _makes_double(largest: Tensor | None) -> bool:
    if largest is None or largest.numel() < _LEAST_DOUBLE:
        return False
    return largest.dtype in (torch.float64, torch.complex128)


def _zero_rows_of_table(name: str, result: Tensor | None) -> float:
    """Return the share of the rows of a table's gradient that are zero; 0 of another result."""
    is_gradient = name == "aten::embedding_dense_backward"
    if not is_gradient or result is None or result.numel() < _LEAST_FACTOR:
        return 0.0
    largest_of_rows = torch.linalg.vector_norm(result, ord=float("inf"), dim=-1)
    return float((largest_of_rows == 0).float().mean())


def _with_zeros(operand: Operand, factor: Tensor) -> Operand:
    """Return ``operand`` with the shares of zeros in ``factor``, its values."""
    # sums of ones in bfloat16 end at 256
    dtype = torch.promote_types(factor.dtype, torch.float32)
    in_rows = torch.linalg.vector_norm(factor, ord=0, dim=-1, dtype=dtype)
    zeros = 1.0 - float(in_rows.sum()) / factor.numel()
    if zeros < 0.5:
        return operand._replace(zeros=zeros)
    in_columns = torch.linalg.vector_norm(factor, ord=0, dim=-2, dtype=dtype)
    zero_rows = float((in_rows == 0).to(dtype).mean())
    zero_columns = float((in_columns == 0).to(dtype).mean())
    fullest_row = float(in_rows.max()) / operand.columns
    fullest_column = float(in_columns.max()) / operand.rows
    return operand._replace(
        zeros=zeros,
        zero_rows=zero_rows,
        zero_columns=zero_columns,
        fullest_line=min(fullest_row, fullest_column),
    )


@contextmanager
def _noted_reading(note: Callable[[Tensor], object]) -> Iterator[None]:
    """Have methods by which Python reads a tensor's elements call ``note`` first."""
    with ExitStack() as stack:
        for name in _READING_METHODS:
            stack.enter_context(_replaced_method(name, note))
        yield


@contextmanager
def _replaced_method(name: str, note: Callable[[Tensor], object]) -> Iterator[None]:
    own_method = vars(Tensor).get(name)
    method = getattr(Tensor, name)

    @wraps(method)
    def noting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        note(tensor)
        return method(tensor, *args, **kwargs)

    setattr(Tensor, name, noting)
    try:
        yield
    finally:
        if own_method is None:
            delattr(Tensor, name)
        else:
            setattr(Tensor, name, own_method)
