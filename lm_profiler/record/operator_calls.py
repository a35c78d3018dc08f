"""The operator calls of one step: what each reads and writes, how long it took, and which lines called it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

# the name of a call that stands for code whose operators are not recorded, and which has used gradients
UNRECORDED_UPDATE = "unrecorded update"
# operators of layers, besides matrix products
_LAYERS = ("aten::embedding", "aten::convolution")


class CodeLine(NamedTuple):
    """A line of the program."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, kw_only=True)
class LineOperators:
    """Operators of one step that a line runs without calling a function, as in ``x @ y``.

    Python's profiler reports calls only, so it counts their time as that of the line's own code.
    """

    phase: str
    file: str
    line: int
    function: str  # with the names of its classes, as in ``Net.forward``
    calls: int
    seconds: float  # without the overhead of calling an operator


class Operand(NamedTuple):
    """A factor of a matrix product, and how much of it is zero."""

    storage: int
    rows: int
    columns: int
    zeros: float = 0.0  # share of its elements that are zero
    zero_rows: float = 0.0  # share of its rows that are zero everywhere
    zero_columns: float = 0.0  # share of its columns that are zero everywhere
    # the smaller of two shares: of nonzero elements in the row that has most of them, and in such a column
    fullest_line: float = 1.0


class Product(NamedTuple):
    """A product of two matrices, or of ``batch`` pairs of them."""

    batch: int
    left: Operand
    right: Operand


class CausalMask(NamedTuple):
    """A mask of attention that hides all later positions, and nothing else."""

    storage: int
    length: int  # the number of positions


class LinearMap(NamedTuple):
    """A convolution, or a product with a weight.

    The sum of two such maps with the same input and settings is again such a map.
    """

    inputs: int  # identifies the values of its input
    result_shape: tuple[int, ...]
    settings: tuple[int, ...]  # of a convolution: its strides and groups
    kernel: tuple[int, ...]  # sizes of the kernel of a convolution
    padding: tuple[int, ...]


# the lengths of the sequences of a PackedSequence, compared with one another
PackedLengths = Literal["equal", "different"]


class LayerCall(NamedTuple):
    """A call of a recurrent layer, such as ``nn.GRU``, with sequences of one element."""

    layer: int  # identifies the layer
    inputs: int  # the storage of the elements
    states: tuple[int, ...]  # the storages of the states that it gets


@dataclass(frozen=True, kw_only=True)
class OperatorCall:
    """A call of an operator.

    A storage is the memory of one or more tensors; it is identified by a number. A call is identified by its index in
    ``StepCalls.calls``, its number.
    """

    name: str  # the name of the operator, such as ``aten::mm``
    # whether it only makes a view; such a call is recorded if backward computes a gradient for it
    is_view: bool = False
    phase: str
    seconds: float
    reads: tuple[int, ...]  # the storages whose content it reads
    writes: tuple[int, ...]  # the storages that it creates or changes
    # the storages among ``writes`` that keep nothing of their earlier content
    overwrites: frozenset[int] = frozenset()
    # the program's lines that led to it, the outermost first; in backward only lines of hooks and the like
    lines: tuple[CodeLine, ...] = ()
    # the program's line that runs it without calling a function, as in ``x @ y``; None for other calls
    syntax_line: CodeLine | None = None
    # for a call of a backward pass, the number of the forward call that it belongs to; None if unknown
    forward: int | None = None
    # identifies the computed value: calls with the same one compute the same; None if unknown
    value: int | None = None
    # whether it computes the same in each step, because nothing that it depends on changes
    is_constant: bool = False
    is_host_read: bool = False  # whether Python reads the computed values
    elements: int = 0  # number of elements of its largest result
    size: int = 0  # number of elements of its largest argument or result
    first_elements: int = 0  # number of elements of its first argument
    # whether it broadcasts small tensors to a far larger one, such as two columns to the table of all their pairs
    broadcasts: bool = False
    # whether the tensors that it broadcasts have different numbers of dimensions, as by mistake
    broadcasts_missing_dimensions: bool = False
    makes_double: bool = False  # whether its largest result is of float64
    multiplies_by_zero: bool = False  # whether it multiplies a tensor by the number 0
    # whether a recurrent cell of torch called it, such as ``nn.LSTMCell``
    is_of_cell: bool = False
    # whether a recurrent layer of torch called it, such as ``nn.GRU``
    is_of_recurrent_layer: bool = False
    # if that layer gets a PackedSequence: whether its sequences are equally long
    packed_lengths: PackedLengths | None = None
    # whether the cell's layer for whole sequences, such as ``nn.LSTM``, has a fused kernel
    has_sequence_kernel: bool = False
    # the call of a recurrent layer that called it; None for bidirectional layers
    layer_call: LayerCall | None = None
    linear_map: LinearMap | None = None  # the layer, if it is a convolution or product
    # if it adds or stacks tensors: the storages of those whose elements keep their places
    added: frozenset[int] = frozenset()
    product: Product | None = None  # its factors, if it is a matrix product
    # if it copies rows by ``x[index]`` on the CPU, with one tensor of integers: the number of elements of a row
    indexed_row_elements: int = 0
    # whether it is the softmax on the CPU of logits that a program transposed, as (batch, classes, positions)
    has_transposed_logits: bool = False
    # the mask of fused attention, if it only hides later positions
    causal_mask: CausalMask | None = None
    # whether it runs on the CPU with a tensor in half precision among its arguments
    has_half_input: bool = False
    # if it computes in half precision on the CPU: its seconds in float32 as a share of its own; 0 if it only converts
    # from or to half precision; None if that is unknown
    float32_share: float | None = None
    # if it works on images on the CPU, as a convolution does: its seconds with tensors in the memory format
    # ``channels_last`` as a share of its own; None if that is unknown, or if they are in it
    channels_last_share: float | None = None
    # if it is a convolution on the CPU whose patches do not overlap, or the backward pass of such a convolution: the
    # seconds of an equal linear layer as a share of its own; None if that is unknown
    linear_share: float | None = None
    # if it is a convolution on the CPU with a long kernel, or the backward pass of such a convolution: its seconds by
    # FFT as a share of its own; None if that is unknown
    fourier_share: float | None = None
    # whether it multiplies by a sparse matrix
    is_sparse_product: bool = False
    # if it multiplies by a sparse matrix in COO on the CPU: its seconds with the matrix in CSR as a share of its own;
    # None if that is unknown, or if the step computes the matrix
    csr_share: float | None = None
    # if it computes the gradient of a table: the share of rows that are zero because no index looked them up
    zero_rows: float = 0.0
    # if it belongs to a backward pass: the shares of elements, and of rows, that are zero in its result but not in the
    # gradient that it gets
    made_zero_elements: float = 0.0
    made_zero_rows: float = 0.0

    @property
    def is_layer(self) -> bool:
        """Whether it is a matrix product, a convolution or a look-up of an embedding."""
        is_product = self.product is not None or self.is_sparse_product
        return is_product or self.name in _LAYERS


@dataclass(frozen=True, kw_only=True)
class StepCalls:
    """All operator calls of one step, in order."""

    calls: Sequence[OperatorCall]
    # storages of the parameters that an optimizer updates
    trained: frozenset[int] = frozenset()
    # storages of the tensors that modules had when the step began
    of_modules: frozenset[int] = frozenset()
    # storages that may be read by code whose calls were not recorded, in the step or after it
    kept: frozenset[int] = frozenset()
    # False if kernels ran that bypass torch: they may have read results without being recorded
    is_complete: bool = True
    trained_elements: int = 0  # number of elements of all trained parameters
    # whether it computes gradients of inputs, as adversarial training does
    has_gradients_of_inputs: bool = False
    # whether the parameters are of float64
    is_double: bool = False

    @cached_property
    def phase_s(self) -> Mapping[str, float]:
        """The seconds of the calls of each phase."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for call in self.calls:
            seconds[call.phase] += call.seconds
        return seconds

    @cached_property
    def writers(self) -> Mapping[int, Sequence[int]]:
        """For each storage, the numbers of the calls that write it, in order."""
        writers: defaultdict[int, list[int]] = defaultdict(list)
        for number, call in enumerate(self.calls):
            for storage in call.writes:
                writers[storage].append(number)
        return writers

    def only_writer_of(self, storage: int) -> int | None:
        """Return the number of the only call that writes ``storage``; None if there is none or several."""
        writers = self.writers.get(storage, ())
        return writers[0] if len(writers) == 1 else None

    def is_changed(self, number: int) -> bool:
        """Return whether other calls also write to the result of a call. The step then needs a result of its own."""
        writes = self.calls[number].writes
        return any(len(self.writers[storage]) > 1 for storage in writes)

    @cached_property
    def readers(self) -> Mapping[int, Sequence[int]]:
        """For each storage, the numbers of the calls that read it, in order."""
        readers: defaultdict[int, list[int]] = defaultdict(list)
        for number, call in enumerate(self.calls):
            for storage in call.reads:
                readers[storage].append(number)
        return readers

    def readers_of_result(self, number: int) -> Iterator[int]:
        """Yield the numbers of the calls that read what a call writes; twice if a call reads two results."""
        for storage in self.calls[number].writes:
            yield from self.readers.get(storage, ())

    @cached_property
    def backward_of(self) -> Mapping[int, Sequence[int]]:
        """For each forward call, by its number, the numbers of the calls of its backward pass."""
        backward: defaultdict[int, list[int]] = defaultdict(list)
        for number, call in enumerate(self.calls):
            if call.forward is not None:
                backward[call.forward].append(number)
        return backward

    def with_backward(self, number: int) -> tuple[int, ...]:
        """Return the numbers of a call and of the calls of its backward pass."""
        return (number, *self.backward_of.get(number, ()))

    def seconds_with_backward(self, number: int) -> float:
        """Return the seconds of a call and of the calls of its backward pass."""
        return sum(
            self.calls[related].seconds for related in self.with_backward(number)
        )

    def lines_of(self, number: int) -> tuple[CodeLine, ...]:
        """Return the lines that led to a call; for a call of a backward pass, those of its forward call."""
        call = self.calls[number]
        while not call.lines and call.forward is not None and call.forward < number:
            number = call.forward
            call = self.calls[number]
        return call.lines

    def place_of(self, numbers: Iterable[int]) -> CodeLine | None:
        """Return the line of the program that is most responsible for the time of some calls; None if there is none.

        It is the innermost line that led to at least half of their seconds, or else the line that led to most of them.
        """
        total_s = 0.0
        seconds_by_line: defaultdict[CodeLine, float] = defaultdict(float)
        depth_of_line: dict[CodeLine, int] = {}
        for number in numbers:
            seconds = self.calls[number].seconds
            total_s += seconds
            for depth, line in enumerate(dict.fromkeys(self.lines_of(number))):
                seconds_by_line[line] += seconds
                depth_of_line[line] = max(depth, depth_of_line.get(line, 0))
        main_lines = [
            line for line, seconds in seconds_by_line.items() if seconds >= total_s / 2
        ]
        if main_lines:
            return max(main_lines, key=depth_of_line.__getitem__)
        return max(seconds_by_line, key=seconds_by_line.__getitem__, default=None)
