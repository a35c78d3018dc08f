"""Counts the FLOPs of a step while it runs, from the real shapes of every operator.

Convention: a multiply-add is two FLOPs. Only matmuls, convolutions and attention count; element-wise work, norms,
softmax, look-ups, distances without a matmul, solvers and Fourier transforms do not. Causal attention counts in full,
4·B·T²·D forward per layer, as in PaLM (Chowdhery et al. 2022, appendix B) and most published MFUs; to count half of
it, subtract 2·B·T²·D per layer forward and 4·B·T²·D backward. The scores that flash kernels recompute in their backward
do not count, because recomputing them is the kernel's choice. The gradient of the input of recurrent layers counts even
if it is not needed, because oneDNN and cuDNN always compute it.

Nothing runs twice, and results do not change. Backward passes are seen even if autograd runs them in threads of its own
(on CUDA), because these threads inherit the caller's dispatch modes (``ThreadLocalState`` in torch's ``graph_task.h``).
Work that bypasses torch's dispatcher is not seen: graphs of torch.compile, replayed CUDA graphs, kernels that
extensions launch themselves, and threads that a step starts itself. Such kernels are detected by their results
(``foreign_kernels``). Their FLOPs and those of operators without a formula are missing: the count names them, and is a
lower bound.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial, wraps
from math import prod
from traceback import walk_stack
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import enable_reentrant_dispatch
from torch.utils import checkpoint
from torch.utils.flop_counter import flop_registry

from lm_profiler.measure.boundary import comes_from_outside, error_text
from lm_profiler.measure.clocks.tape import BACKWARD, FORWARD, OPTIMIZER, OUTSIDE
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.counts import flex_attention
from lm_profiler.measure.counts.call_tensors import base_name
from lm_profiler.measure.counts.foreign_kernels import ForeignKernels
from lm_profiler.measure.counts.package_formulas import (
    PACKAGE_FORMULAS,
    AttentionFormula,
    imported_functions,
)
from lm_profiler.measure.counts.registered import (
    Formula,
    FunctionFormulas,
    function_formulas,
    has_context,
    operator_formulas,
)
from lm_profiler.measure.counts.replaced_method import replaced_method
from lm_profiler.measure.counts.step_operators import StepOperators
from lm_profiler.measure.counts.traffic import ForwardTraffic
from lm_profiler.measure.counts.uncountable import NoFormulaError, UncountableError
from lm_profiler.record.parts import PARTS
from lm_profiler.record.run_record import Flops
from lm_profiler.torch_names import (
    DISPATCH_MODE,
    FAKES,
    GRAPH_TASK,
    MODE_STACK,
    tree_leaves,
)

WORK = ("forward", "backward", "recomputation", "optimizer")

# Formulas in this file also take the operator's result, as ``out_val``; registered ones take only its arguments.

# namespaces of distributed torch, whose operators communicate and multiply nothing
_PARALLEL = (
    "c10d",
    "_c10d_functional",
    "_c10d_functional_autograd",
    "_dtensor",
    "fsdp",
)
# namespaces of torch's other operators that have a schema
_PLAIN = ("aten", "prim", "prims", "profiler")
_TORCHS_OWN = frozenset((*_PLAIN, *_PARALLEL, "higher_order"))
# namespaces whose operators are known: those that multiply have a formula or are in ``_OPERATORS_WITHOUT_FORMULA``
_KNOWN_NAMESPACES = {
    *_PLAIN,
    *_PARALLEL,
    "torchvision",
    "torchaudio",
    "torch_scatter",
    "torch_cluster",
}

# operators that multiply, and have no formula in torch or here
_OPERATORS_WITHOUT_FORMULA = {
    "aten::_trilinear",
    "aten::_foreach_mm",
    "aten::conv_tbc",
    "aten::_mixed_dtypes_linear",
    "aten::hspmm",
    "aten::sparse_sampled_addmm",
    "aten::_sparse_sparse_matmul",
    "aten::_sparse_mm_reduce_impl",
    "aten::_sparse_semi_structured_linear",
    "aten::_sparse_semi_structured_mm",
    "aten::_sparse_semi_structured_addmm",
    "aten::_cslt_sparse_mm",
    "aten::_dyn_quant_matmul_4bit",
    "aten::_weight_int4pack_mm",
    "aten::_weight_int4pack_mm_for_cpu",
    "aten::_weight_int4pack_mm_with_scales_and_zeros",
    "aten::quantized_gru",
    "aten::quantized_lstm",
    "aten::_triton_multi_head_attention",
    "aten::_triton_scaled_dot_attention",
    "aten::mkldnn_linear",
    "aten::mkldnn_convolution",
    "aten::miopen_convolution",
    "aten::_mps_convolution",
    "aten::_lstm_mps",
    "torchvision::deform_conv2d",
    "torchvision::_deform_conv2d_backward",
}
# the class of operators with a schema; higher-order operators have others
_OVERLOAD = type(torch.ops.aten.add.Tensor)


def formula_of(operator: Any) -> Formula | None:
    """Return the formula of ``operator``; None if it multiplies nothing.

    Raises:
        NoFormulaError: the operator may multiply, and has no formula.
    """
    name = f"higher_order::{operator}"
    if isinstance(operator, _OVERLOAD):
        name = base_name(operator)
    registered = operator_formulas.get(name)
    if registered is not None:
        return _without_result(registered)
    if name in PACKAGE_FORMULAS:
        return PACKAGE_FORMULAS[name]
    namespace, _, base = name.partition("::")
    if namespace == "higher_order" and base in _HIGHER_ORDER:
        return _HIGHER_ORDER[base]
    # A packet is an operator with all its overloads.
    packets = [getattr(operator, "overloadpacket", operator)]
    # names such as ``__and__`` also end with an underscore
    works_in_place = base.endswith("_") and not base.startswith("__")
    if namespace == "aten" and works_in_place:
        # ``addmm_`` has the formula of ``addmm``
        packets.append(getattr(torch.ops.aten, base[:-1], None))
    for packet in packets:
        formula = _FORMULAS.get(packet) or flop_registry.get(packet)
        if formula is not None:
            return formula
    if namespace in _KNOWN_NAMESPACES and name not in _OPERATORS_WITHOUT_FORMULA:
        return None
    raise NoFormulaError(name)


def _without_result(formula: Formula) -> Formula:
    """Return ``formula`` for a caller that also passes the operator's result."""

    def formula_of_arguments(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return formula(*args, **kwargs)

    return formula_of_arguments


def _matmul(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """Count the matmul of [G, M, K] and [G, K, N], where G, M and N may be missing.

    If only one factor has groups (a mixture of experts), each row or column of the other one is multiplied with one
    group, and counts once.
    """
    columns = right.shape[-1] if right.ndim > 1 else 1
    if left.layout is not torch.strided:
        return 2 * _stored_elements(left) * columns
    if right.layout is not torch.strided:
        rows = left.shape[0]
        return 2 * rows * _stored_elements(right)
    are_both_batched = left.ndim == 3 and right.ndim == 3
    groups = left.shape[0] if are_both_batched else 1
    left_elements = prod(left.shape[-2:])  # M·K, the elements of one group
    return 2 * groups * left_elements * columns


def _scaled_matmul(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """Count the matmul of factors in 8 bits, or in 4 bits, of which torch stores two values in an element."""
    has_two_values_per_element = str(left.dtype).endswith("_x2")
    values_per_element = 2 if has_two_values_per_element else 1
    return values_per_element * _matmul(left, right)


def _weight_by_rows(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    """Count the matmul of [M, K] and a weight of [N, K]."""
    return 2 * x.numel() * weight.shape[0]


def _stored_elements(factor: Tensor) -> int:
    """Return how many elements a sparse matrix stores (per matrix, if there is a batch of them)."""
    if factor.layout is torch.sparse_coo:
        values = factor.coalesce().values()
        return int(values.shape[0])
    if factor.layout in (torch.sparse_csr, torch.sparse_csc):
        batch_dimensions = factor.ndim - 2
        return int(factor.values().shape[batch_dimensions])
    raise UncountableError(f"a product with a matrix of layout {factor.layout}")


def _convolution(
    x: Tensor, weight: Tensor, *rest: Any, out_val: Tensor, **__: Any
) -> int:
    """Count a convolution; ``out_val`` is its result."""
    # ``rest`` is bias, stride, padding, dilation, whether it is transposed, …
    is_transposed = rest[4]
    return _convolution_flops(x.shape, weight, out_val.shape, is_transposed)


def _convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, *rest: Any, **__: Any
) -> int:
    """Count the gradients of a convolution that are requested.

    The gradients of input and weight are each as much work as the convolution itself; torch's own formula counts too
    much for grouped convolutions.
    """
    # ``rest`` is the sizes of the bias, stride, padding, dilation, whether it is transposed, the padding of the output,
    # groups, and which gradients are requested.
    is_transposed = rest[4]
    needs_input, needs_weight, _ = rest[7]  # the gradient of the bias is a sum
    gradients = int(needs_input) + int(needs_weight)
    return gradients * _convolution_flops(x.shape, weight, grad.shape, is_transposed)


def _convolution_flops(
    input_shape: Sequence[int],
    weight: Tensor,
    output_shape: Sequence[int],
    is_transposed: bool,
) -> int:
    """Count one multiply-add for each weight at each position of the output (of the input if it is transposed)."""
    shape = input_shape if is_transposed else output_shape
    samples = input_shape[0]
    positions = prod(shape[2:])
    return 2 * weight.numel() * samples * positions


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Count attention of queries [batch, heads, time, width], with keys and values alike.

    It has two matmuls: the scores of queries and keys, and the weighted sums of values.
    """
    scores = prod(query.shape[:-1]) * key.shape[-2]
    return 2 * scores * (query.shape[-1] + value.shape[-1])


def _twice_forward(forward_name: str, input_count: int) -> Formula:
    """Return a formula for the backward of attention on sequences of different lengths: twice torch's forward formula.

    The backward's arguments are the gradient, the ``input_count`` inputs of forward, results of forward, and lengths.
    """

    def formula(gradient: Any, *args: Any, **options: Any) -> int:
        """Count twice what torch's formula counts for forward."""
        forward_formula = flop_registry.get(getattr(torch.ops.aten, forward_name, None))
        if forward_formula is None:
            raise UncountableError(
                "this version of torch has no formula for attention on sequences of different lengths"
            )
        inputs = args[:input_count]
        # In both operators for which this is used, the inputs and results before the lengths are five arguments.
        lengths = args[5:9]
        return 2 * int(forward_formula(*inputs, *lengths))

    return formula


def _multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    width: int,
    heads: int,
    *weights: Any,
    **__: Any,
) -> int:
    """Count the fused ``nn.MultiheadAttention`` of evaluation: four projections, scores and weighted sums.

    The tensors are batches of sequences; ``width`` is that of all ``heads`` together.
    """
    query_lengths = _lengths(query)
    key_lengths = _lengths(key)
    # Queries are projected, and so are results, which have as many rows; then keys and values.
    projected_rows = 2 * sum(query_lengths) + sum(key_lengths) + sum(_lengths(value))
    projections = 2 * width * width * projected_rows
    pairs = sum(
        queries * keys for queries, keys in zip(query_lengths, key_lengths, strict=True)
    )
    # 2 for a score, and 2 for adding a weighted value
    attention = 4 * width * pairs
    return projections + attention


def _encoder_layer(x: Tensor, width: int, heads: int, *weights: Any, **__: Any) -> int:
    """Count the fused ``nn.TransformerEncoderLayer`` of evaluation.

    ``weights`` begins with weight and bias of queries, keys and values, weight and bias of the projection, three
    options and the norms' four parameters. Weight and bias of the two layers of the feed-forward block follow.
    """
    first_layer: Tensor = weights[11]
    second_layer: Tensor = weights[13]
    rows = sum(_lengths(x))
    attention = _multi_head_attention(x, x, x, width, heads)
    feed_forward = 2 * rows * (first_layer.numel() + second_layer.numel())
    return attention + feed_forward


def _lengths(sequences: Tensor) -> list[int]:
    """Return the length of each sequence of a batch; they differ in a nested tensor, made from a padding mask."""
    if sequences.is_nested:
        return [sequence.shape[0] for sequence in sequences.unbind()]
    batch, length = sequences.shape[:2]
    return [length] * batch


def _recurrent_layer(
    x: Tensor, w_input: Tensor, w_hidden: Tensor, *_: Any, **__: Any
) -> int:
    """Count a recurrent layer: each element of the sequences ``x`` is multiplied with both weights once."""
    return _recurrent_layers(x, (w_input, w_hidden))


def _recurrent_layers(x: Tensor, weights: Sequence[Tensor], *_: Any, **__: Any) -> int:
    """Count several recurrent layers: each element of the sequences ``x`` is multiplied with all matrices once."""
    tokens = prod(x.shape[:-1])
    matrix_elements = 0
    for weight in weights:
        if weight.ndim == 2:  # no bias
            matrix_elements += weight.numel()
    return 2 * tokens * matrix_elements


def _euclidean_distance(left: Tensor, right: Tensor, **_: Any) -> int:
    """Count the matmul of [M, K] and [N, K], from which the distances follow."""
    rows_of_right = right.shape[-2]
    return 2 * prod(left.shape) * rows_of_right


def _skip_argument(formula: Formula) -> Formula:
    """Return ``formula`` for an operator with one more argument in front, such as a bias or a gradient."""

    def formula_of_rest(_: Any, *args: Any, **kwargs: Any) -> int:
        return formula(*args, **kwargs)

    return formula_of_rest


def _double(formula: Formula) -> Formula:
    """Return a formula for twice the work of ``formula``."""

    def doubled_formula(*args: Any, **kwargs: Any) -> int:
        return 2 * formula(*args, **kwargs)

    return doubled_formula


# torch's registry has most formulas. Here are those that it lacks, or that do not follow the convention above.
_SDPA = (
    "flash_attention",
    "flash_attention_for_cpu",
    "efficient_attention",
    "cudnn_attention",
)
_FUSED = [
    f"_scaled_dot_product_{kind}" for kind in (*_SDPA, "fused_attention_overrideable")
]
_SCALED = ("_scaled_mm", "_scaled_mm_v2", "_scaled_grouped_mm", "_scaled_grouped_mm_v2")
_BIASED = ("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation", "_sparse_addmm")
_BY_NAME: dict[str, Formula] = {
    **dict.fromkeys(
        ("mm", "bmm", "mv", "dot", "vdot", "_int_mm", "_grouped_mm"), _matmul
    ),
    **dict.fromkeys(_SCALED, _scaled_matmul),
    "_weight_int8pack_mm": _weight_by_rows,
    **dict.fromkeys(_BIASED, _skip_argument(_matmul)),
    "_euclidean_dist": _euclidean_distance,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(_FUSED, _attention),
    **dict.fromkeys(
        [f"{name}_backward" for name in _FUSED], _skip_argument(_double(_attention))
    ),
    "_flash_attention_backward": _twice_forward(
        "_flash_attention_forward", input_count=3
    ),
    "_efficient_attention_backward": _twice_forward(
        "_efficient_attention_forward", input_count=4
    ),
    "_native_multi_head_attention": _multi_head_attention,
    "_transformer_encoder_layer_fwd": _encoder_layer,
    "mkldnn_rnn_layer": _recurrent_layer,
    "mkldnn_rnn_layer_backward": _double(_recurrent_layer),
    **dict.fromkeys(("_cudnn_rnn", "miopen_rnn"), _recurrent_layers),
    **dict.fromkeys(
        ("_cudnn_rnn_backward", "miopen_rnn_backward"), _double(_recurrent_layers)
    ),
}


def _formulas() -> dict[Any, Formula]:
    """Return the formulas of ``_BY_NAME`` by operator, for the operators that this version of torch has."""
    formulas: dict[Any, Formula] = {}
    for name, formula in _BY_NAME.items():
        operator = getattr(torch.ops.aten, name, None)
        if operator is not None:
            formulas[operator] = formula
    return formulas


_FORMULAS = _formulas()

# by name, because importing these operators would import torch's compiler
_HIGHER_ORDER: dict[str, Formula] = {
    "flex_attention": flex_attention.forward_flops,
    "flex_attention_backward": flex_attention.backward_flops,
}

_FUSED_ATTENTION = (_attention, flex_attention.forward_flops)

# what torch returns as the number of the current backward pass if there is none
_NO_GRAPH_TASK = -1
# the functions of Python that call autograd's engine
_AUTOGRAD_ENTRY_CODES = {torch.autograd.backward.__code__, torch.autograd.grad.__code__}
# The module of fake tensors, which have shapes and no data. torch itself runs operators on them, to infer shapes.
_MODULE_OF_FAKES = FAKES.path.rpartition(".")[0]
_PLAIN_DISPATCH = Tensor.__torch_dispatch__


class _OperatorKind(NamedTuple):
    """How an operator is handled that torch dispatches to ``FlopCounter``."""

    is_of_wrappers: bool = False  # whether its tensors wrap others
    is_composite: bool = False  # whether it consists of other operators
    is_of_step: bool = False  # whether it belongs to the step, so that it is counted


class FlopCounter(DISPATCH_MODE.as_base()):  # type: ignore[misc]  # a class that is looked up at run time
    """Counts the matmuls of all operators that run while the mode is entered and ``counting`` is set.

    Some tensors wrap others: DTensor (sharded by FSDP2 or tensor parallelism), jagged and quantized tensors. Of these
    only the parts count that this process multiplies. An error while counting makes the count unknown, and has no other
    effect.

    Args:
        traffic: receives all operators of forward passes.
        on_shapes: whether the step itself runs on fake tensors. Otherwise operators on fake tensors are torch's own
            attempts to infer shapes, and do not count.
        operators: receives all operators.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # If this were True, torch would import its compiler, to exclude this mode from it. Nothing here is compiled.
        return False

    def __init__(
        self,
        traffic: ForwardTraffic | None = None,
        on_shapes: bool = False,
        operators: StepOperators | None = None,
    ) -> None:
        super().__init__()
        GRAPH_TASK.find()  # raises here, before a step, if this version of torch lacks it
        self._on_shapes = on_shapes
        self._traffic = traffic
        self._operators = operators
        self._foreign_kernels = ForeignKernels()
        self.counting = True
        self.is_in_optimizer = False
        self._failure: UncountableError | None = None  # why the count cannot be trusted
        # how often operators without a formula ran
        self._missing: Counter[str] = Counter()
        # autograd Functions that a formula counts, in the order of their first call
        self._functions: dict[str, None] = {}
        # FLOPs of fused attention in forward, as if no pair were masked
        self._attention_flops = 0
        # FLOPs by kind of ``WORK`` and dtype
        self._flops: Counter[tuple[str, str]] = Counter()
        self._formula_of = cache(formula_of)
        self._is_composite = cache(_is_composite)
        self._thread = threading.get_ident()

    def flops(self) -> Flops:
        """Return what was counted so far.

        Raises:
            UncountableError: the work of an operator that ran is unknown.
        """
        if self._failure is not None:
            raise self._failure
        flops_by_work = dict.fromkeys(WORK, 0)
        for (work, _), flops in self._flops.items():
            flops_by_work[work] += flops
        return Flops(
            forward=flops_by_work["forward"],
            backward=flops_by_work["backward"],
            recomputation=flops_by_work["recomputation"],
            optimizer=flops_by_work["optimizer"],
            attention=self._attention_flops,
            uncounted=self._uncounted(),
            functions_counted=list(self._functions),
        )

    def _uncounted(self) -> list[str]:
        """Return the names of operators and kernels that ran and were not counted, the most frequent first."""
        counts = self._missing + self._foreign_kernels.counts
        return [name for name, _ in counts.most_common()]

    @property
    def sees_all(self) -> bool:
        """Whether all work came from operators: no formula counted a Function, and no foreign kernel was found."""
        return not self._functions and not self._foreign_kernels.counts

    def begin_pass(self) -> None:
        """Begin to observe a forward pass, a backward pass or an optimizer's step."""
        self._foreign_kernels.begin()

    def add_forward(
        self, name: str, formulas: FunctionFormulas, args: Any, kwargs: Any, result: Any
    ) -> int | None:
        """Count the forward of the registered Function ``name``, and return its FLOPs; None if they are unknown."""
        self._functions[name] = None
        flops = self.add_call(f"{name}.forward", formulas.forward, args, kwargs, result)
        is_attention = flops is not None and formulas.unmasked is not None
        if is_attention and self._kind_of_work() == "forward":  # no recomputation
            assert formulas.unmasked is not None
            self._attention_flops += formulas.unmasked(*args, **kwargs)
        return flops

    def add_call(
        self, name: str, formula: Formula, args: Any, kwargs: Any, result: Any
    ) -> int | None:
        """Count the call of a registered Function by its ``formula``, and return its FLOPs.

        An error makes the count unknown. If the formula raises NoFormulaError, the call is missing from the count.
        """
        flops = None
        try:
            self._foreign_kernels.forget(result)
            if self._failure is None:
                flops = formula(*args, **kwargs)
                dtype = _dtype(args, (kwargs, result))
                self._flops[self._kind_of_work(), dtype] += flops
        except NoFormulaError as missing:
            self._missing[str(missing)] += 1
        except BaseException as error:
            self._stop_counting(f"the formula of {name}", error)
        return flops

    def _kind_of_work(self) -> str:
        """Return to which kind of ``WORK`` the operator that runs belongs."""
        if self.is_in_optimizer:
            return "optimizer"
        return _kind_of_pass(self._thread)

    def by_dtype(self) -> dict[str, dict[str, int]]:
        """Return what was counted so far, by the kind of ``WORK`` and the dtype of the factors."""
        by_dtype: dict[str, dict[str, int]] = {}
        for (work, dtype), flops in self._flops.items():
            flops_of_work = by_dtype.setdefault(work, {})
            flops_of_work[dtype] = flops
        return by_dtype

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operator ``func`` (torch calls this for each one), and count its FLOPs if it belongs to the step."""
        kwargs = kwargs or {}
        try:
            kind = self._kind_of_operator(func, types)
        except BaseException as error:
            self._stop_counting(func, error)
            kind = _OperatorKind()  # ``func`` only runs
        if kind.is_of_wrappers:
            # The class of the tensors runs the operator on those that they wrap, and it arrives here again.
            return NotImplemented
        if kind.is_composite:
            # dispatched anew, so that its parts run under autocast, as without this mode
            with enable_reentrant_dispatch(), self:
                return func.decompose(*args, **kwargs)
        is_counted = kind.is_of_step and self.counting
        # Torch's own operators run under no autocast here, custom ones under their caller's.
        autocast: AbstractContextManager[Any] = nullcontext()
        try:
            if func.namespace not in _TORCHS_OWN:
                autocast = _autocast_of_caller()
        except BaseException as error:
            self._stop_counting(func, error)
        operators = self._operators
        began_ns = 0 if operators is None else operators.clock()
        with autocast:
            result = func(*args, **kwargs)
        if kind.is_of_step and operators is not None:
            operators.guard.run(
                operators.note_call, func, args, kwargs, result, began_ns
            )
        if is_counted:
            try:
                self._count(func, args, kwargs, result)
            except BaseException as error:
                self._stop_counting(func, error)
        return result

    def _kind_of_operator(self, func: Any, types: Any) -> _OperatorKind:
        """Return how ``func`` is to be handled, called with tensors of the classes ``types`` (those with a dispatch).

        This calls code of the user's classes, which may raise anything.
        """
        wraps_tensors = False
        has_fakes = False
        for tensor_class in types:
            if tensor_class.__torch_dispatch__ is not _PLAIN_DISPATCH:
                wraps_tensors = True
                if str(tensor_class.__module__).startswith(_MODULE_OF_FAKES):
                    has_fakes = True
        if wraps_tensors and not has_fakes:
            return _OperatorKind(is_of_wrappers=True)
        # The namespace ``prim`` has queries, such as the device of a fake tensor.
        is_query = func.namespace == "prim"
        return _OperatorKind(
            is_composite=not has_fakes and self._is_composite(func),
            is_of_step=not is_query and (self._on_shapes or not has_fakes),
        )

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add the FLOPs of one call of the operator ``func``, and the bytes that it reads in forward.

        The two are independent: if one becomes unknown, the other is still counted.
        """
        if self._failure is None:
            self._count_flops(func, args, kwargs, result)
        is_forward = not self.is_in_optimizer and GRAPH_TASK.find()() == _NO_GRAPH_TASK
        if self._traffic is not None and is_forward:
            try:
                self._traffic.note_call(func, args, kwargs, result)
            except BaseException as error:
                if comes_from_outside(error):
                    raise
                self._traffic.lost = True

    def _count_flops(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add the FLOPs of one call of ``func``; note its name if it may multiply but has no formula."""
        try:
            formula = self._formula_of(func)
            flops = 0
            if formula is not None:
                flops = formula(*args, **kwargs, out_val=result)
            if flops:
                work = self._kind_of_work()
                self._flops[work, _dtype(args, kwargs)] += flops
                if work == "forward":
                    self._attention_flops += _unmasked(formula, args, kwargs)
            self._foreign_kernels.note_call(func, args, kwargs, result)
        except NoFormulaError as missing:
            self._missing[str(missing)] += 1
        except BaseException as error:
            self._stop_counting(func, error)

    def _stop_counting(self, func: Any, error: BaseException) -> None:
        """Make the count unknown. An error of counting must not reach the step, but Ctrl-C and the like must."""
        if comes_from_outside(error):
            raise error
        # a new exception, because the traceback of ``error`` would keep the tensors of the step alive
        if isinstance(error, UncountableError):
            self._failure = type(error)(str(error))
        else:
            self._failure = UncountableError(f"{func}: {error_text(error)}")


def _unmasked(formula: Formula | None, args: Any, kwargs: Any) -> int:
    """Return the FLOPs of a call of fused attention as if no pair were masked; 0 of any other call."""
    if formula in _FUSED_ATTENTION:
        query, key, value = args[:3]
        return _attention(query, key, value)
    if isinstance(formula, AttentionFormula):
        return formula.unmasked(*args, **kwargs)
    return 0


def _dtype(args: Any, kwargs: Any) -> str:
    """Return the name of the dtype of the first tensor."""
    tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    return str(next(tensors).dtype).removeprefix("torch.")


def _is_composite(func: Any) -> bool:
    """Return whether ``func`` consists of other operators on every device.

    torch splits such operators before they reach a mode, except under inference mode.
    """
    if not isinstance(func, _OVERLOAD):
        return False
    has_kernel: Callable[[Any], bool] = func.has_kernel_for_dispatch_key
    has_kernel_of_device = has_kernel("CPU") or has_kernel("CUDA")
    return has_kernel("CompositeImplicitAutograd") and not has_kernel_of_device


def _autocast_of_caller() -> AbstractContextManager[Any]:
    """Return a context with the caller's autocast, which torch turns off before it calls a mode.

    A user's custom operator may call others, which must run as they would without this mode.
    """
    dtypes: dict[str, torch.dtype] = {}
    with enable_reentrant_dispatch():
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                dtypes[device_type] = torch.get_autocast_dtype(device_type)
    is_cached = torch.is_autocast_cache_enabled()
    stack = ExitStack()
    for device_type, dtype in dtypes.items():
        autocast = torch.autocast(device_type, dtype, cache_enabled=is_cached)
        stack.enter_context(autocast)
    return stack


def _kind_of_pass(caller: int) -> str:
    """Return what this thread does: "forward", "backward" or "recomputation".

    Recomputation is what ``torch.utils.checkpoint`` runs within a backward pass, and whatever else runs there with
    gradients on: a backward pass has them off unless it will itself be differentiated (``create_graph``).
    ``caller`` is the thread that called autograd.
    """
    is_in_backward = GRAPH_TASK.find()() != _NO_GRAPH_TASK
    if not is_in_backward:
        return "forward"
    engine, is_checkpointed = _engine_and_checkpoint(sys._getframe())
    if engine is None:  # a thread of autograd's own
        engine, _ = _engine_and_checkpoint(sys._current_frames()[caller])
    will_be_differentiated = engine is not None and engine.f_locals["create_graph"]
    has_unexpected_gradients = torch.is_grad_enabled() and not will_be_differentiated
    if is_checkpointed or has_unexpected_gradients:
        return "recomputation"
    return "backward"


def _engine_and_checkpoint(innermost: FrameType) -> tuple[FrameType | None, bool]:
    """Return the frame that called autograd's engine, and whether a checkpoint runs inside of it.

    The search goes from ``innermost`` outwards; the frame is None if there is none.
    """
    is_checkpointed = False
    for frame, _ in walk_stack(innermost):
        if frame.f_code in _AUTOGRAD_ENTRY_CODES:
            return frame, is_checkpointed
        if frame.f_code.co_filename == checkpoint.__file__:
            is_checkpointed = True
    return None, is_checkpointed


# the parts of a step whose FLOPs count
_COUNTED_PARTS = frozenset((FORWARD, BACKWARD, OPTIMIZER))


class StepFlops:
    """Counts forward, backward and optimizers in a stage that is not timed: an observer of marks.

    The counter's mode is entered where the outermost of the three begins, and left where it ends. Another part inside
    of it, such as clipping, does not count. Data and hooks run without the mode.

    Args:
        timeline: the timeline whose marks are observed.
        traffic: counts the bytes that forward passes read.
        on_shapes: whether the step runs on tensors that have shapes and no data.
        operators: records all calls.
    """

    def __init__(
        self,
        timeline: Timeline,
        traffic: ForwardTraffic | None = None,
        on_shapes: bool = False,
        operators: StepOperators | None = None,
    ) -> None:
        self._timeline = timeline
        self._counter = FlopCounter(traffic, on_shapes, operators)
        self._operators = operators
        self.flops = self._counter.flops
        self.by_dtype = self._counter.by_dtype
        self._traffic = traffic
        self._is_entered = False
        self._is_in_forward = False
        # restores the functions of torch that ``_enter`` replaces
        self._replaced = ExitStack()

    def __call__(self, code: int) -> None:
        """Switch counting on or off for the part of the step that a mark begins."""
        reading = self._timeline.reading()
        open_parts = reading.stack
        innermost_part = open_parts[-1]
        self._counter.counting = innermost_part in _COUNTED_PARTS
        self._counter.is_in_optimizer = innermost_part == OPTIMIZER
        is_in_forward = FORWARD in open_parts
        begins_forward = is_in_forward and not self._is_in_forward
        self._is_in_forward = is_in_forward
        if begins_forward and self._traffic is not None:
            self._traffic.begin()
        is_outside = innermost_part == OUTSIDE  # in a validation, for example
        if self._operators is not None and not is_outside:
            begins_step = len(reading.step.codes) == 1  # it has only this mark
            if begins_step:
                self._operators.guard.run(self._operators.begin_step)
            self._operators.phase = PARTS[innermost_part]
        is_in_counted_part = not _COUNTED_PARTS.isdisjoint(open_parts)
        self._enter_or_leave(is_in_counted_part)

    @property
    def sees_all(self) -> bool:
        """Whether all kernels of the step came from operators, as far as can be seen."""
        return self._counter.sees_all

    def stop(self) -> None:
        self._enter_or_leave(is_wanted=False)

    def _enter_or_leave(self, is_wanted: bool) -> None:
        """Enter the counter's mode if it ``is_wanted``, or leave it."""
        if is_wanted == self._is_entered:
            return
        is_innermost_mode = MODE_STACK.find()()[-1:] == [self._counter]
        if is_wanted:
            self._enter()
        elif is_innermost_mode:
            self._leave()
        else:
            # The step has entered a mode of its own after ours. Modes are left in reverse order, so ours must wait.
            self._counter.counting = False

    def _enter(self) -> None:
        """Replace torch's functions and enter the counter's mode; an error restores the functions."""
        with ExitStack() as replaced:
            replaced.enter_context(_constructed_without(self._counter))
            replaced.enter_context(_registered_functions(self._counter))
            self._counter.begin_pass()
            if self._operators is not None:
                self._operators.guard.run(self._operators.begin_part)
            self._counter.__enter__()
            self._replaced = replaced.pop_all()
        self._is_entered = True

    def _leave(self) -> None:
        """Leave the counter's mode, and restore torch's functions."""
        self._counter.__exit__(None, None, None)
        self._replaced.close()
        if self._operators is not None:
            self._operators.guard.run(self._operators.end_part)
        self._is_entered = False


@contextmanager
def _constructed_without(mode: FlopCounter) -> Iterator[None]:
    """Make Tensor's constructor leave ``mode`` while it runs.

    A tensor that an operator returns through a mode has a Python object already, and torch cannot give it another one
    of a subclass: ``Own(tensor)`` of a ``class Own(torch.Tensor)`` would raise (``THPVariable_NewWithVar`` in torch's
    ``python_variable.cpp``). A constructor runs no matmul, so the count misses nothing.
    """
    mode_stack = MODE_STACK.find()
    replaced = vars(Tensor).get("__new__")
    construct = Tensor.__new__

    def construct_without_mode(kind: type[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Return a new tensor of class ``kind``; leave ``mode`` meanwhile if it is the innermost mode."""
        # No Guard is needed: only torch's own calls could fail in here.
        if mode_stack()[-1:] != [mode]:
            return construct(kind, *args, **kwargs)
        mode.__exit__(None, None, None)
        try:
            return construct(kind, *args, **kwargs)
        finally:
            mode.__enter__()

    type.__setattr__(Tensor, "__new__", staticmethod(construct_without_mode))
    try:
        yield
    finally:
        if replaced is None:
            type.__delattr__(Tensor, "__new__")
        else:  # the replacement of an outer run
            type.__setattr__(Tensor, "__new__", replaced)


@contextmanager
def _registered_functions(counter: FlopCounter) -> Iterator[None]:
    """Count ``forward`` and ``backward`` of registered autograd Functions by their formulas.

    The methods are replaced on the class, where autograd looks them up in each call.
    """
    formulas_by_function = {**imported_functions(), **function_formulas}
    with ExitStack() as stack:
        for function, formulas in formulas_by_function.items():
            counted = _CountedFunction(function, formulas, counter)
            stack.enter_context(
                _replaced_static_method(function, "forward", counted.forward)
            )
            if formulas.backward is not None or formulas.backward_per_forward:
                stack.enter_context(
                    _replaced_static_method(function, "backward", counted.backward)
                )
        yield


class _CountedFunction:
    """Runs the methods of an autograd Function; counts their calls by its formulas, instead of the operators inside."""

    def __init__(
        self, function: Any, formulas: FunctionFormulas, counter: FlopCounter
    ) -> None:
        self._formulas = formulas
        self._counter = counter
        self._name = function.__name__
        self._forward_method = function.forward
        self._backward_method = function.backward
        self._takes_context = has_context(function)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of an autograd Function, and add its FLOPs by its formula."""
        is_counted, result = self._run(self._forward_method, args, kwargs)
        if is_counted:
            context = None
            arguments = args
            if self._takes_context:
                context = args[0]
                arguments = args[1:]
            flops = self._counter.add_forward(
                self._name, self._formulas, arguments, kwargs, result
            )
            if context is not None and self._formulas.backward_per_forward:
                context.lm_profiler_flops = flops  # for ``_backward_from_forward``
        return result

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the backward of an autograd Function, and add its FLOPs: by its own formula, or from the forward."""
        is_counted, result = self._run(self._backward_method, args, kwargs)
        if is_counted:
            name = f"{self._name}.backward"
            formula = self._formulas.backward or self._backward_from_forward
            self._counter.add_call(name, formula, args, kwargs, result)
        return result

    def _backward_from_forward(self, context: Any, *_: Any, **__: Any) -> int:
        """Return the FLOPs of backward: a multiple of what the forward of this call counted."""
        forward_flops = getattr(context, "lm_profiler_flops", None)
        if forward_flops is None:
            raise NoFormulaError(f"{self._name}.backward")
        return int(forward_flops) * self._formulas.backward_per_forward

    def _run(
        self, method: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[bool, Any]:
        """Run ``method`` while its operators do not count. Return whether the call itself counts, and its result."""
        is_counted = self._counter.counting
        self._counter.counting = False
        try:
            return is_counted, method(*args, **kwargs)
        finally:
            self._counter.counting = is_counted


def _replaced_static_method(
    function: Any, name: str, replacement: Callable[..., Any]
) -> AbstractContextManager[None]:
    """Replace a static method of an autograd Function; the replacement shows the signature of the original."""
    # in a partial, because ``wraps`` sets attributes, which bound methods do not allow
    wrapped = wraps(getattr(function, name))(partial(replacement))
    return replaced_method(function, name, staticmethod(wrapped))
