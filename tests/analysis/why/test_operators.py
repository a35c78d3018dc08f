"""Bytes and FLOPs of operators in a trace, against the tensors that they really read, wrote and multiplied."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from lm_profiler.analysis.trace.kinds import operator_kind
from lm_profiler.analysis.trace.packed_trace import Inputs, PackedTrace
from lm_profiler.analysis.why.operators import TensorListFacts, is_cut, least_bytes, product_of

aten = torch.ops.aten
X, Y, ROW = torch.randn(32, 48), torch.randn(32, 48), torch.randn(48)
HALF = torch.randn(32, 48, dtype=torch.bfloat16)
INDICES = torch.randint(0, 32, (7, 5))
Q = torch.randn(2, 4, 16, 8)


def traced_inputs(call: Callable[[], Any], name: str, folder: Path) -> Inputs:
    """What the operator ``name`` was given."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as profiled:
        call()
    path = folder / "trace.json"
    profiled.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    packed = PackedTrace([event for event in events if event.get("name") == name])
    return packed.inputs[0]


def nbytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


MOVED: list[tuple[str, Callable[[], Any], int]] = [
    ("aten::add", lambda: X + Y, nbytes(X, Y, X)),
    ("aten::mul", lambda: X * ROW, nbytes(X, ROW, X)),  # broadcast
    ("aten::mul", lambda: X * 2.0, nbytes(X, X) + 8),  # a number is a tensor of one double
    ("aten::add", lambda: HALF + X, nbytes(HALF, X, X)),  # promoted
    ("aten::mul_", lambda: X.clone().mul_(Y), nbytes(X, Y, X)),
    ("aten::gelu", lambda: torch.nn.functional.gelu(X), nbytes(X, X)),
    ("aten::copy_", lambda: X.to(torch.bfloat16), nbytes(X, HALF)),
    ("aten::fill_", lambda: torch.full((32, 48), 3.0), nbytes(X)),
    ("aten::sum", lambda: X.sum(0), nbytes(X)),
    ("aten::_softmax", lambda: X.softmax(-1), nbytes(X, X)),
    ("aten::native_layer_norm", lambda: torch.nn.functional.layer_norm(X, (48,), ROW, ROW), nbytes(X, ROW, ROW, X)),
    ("aten::index_select", lambda: torch.nn.functional.embedding(INDICES, X), nbytes(INDICES) + 2 * 35 * 48 * 4),
    ("aten::cat", lambda: torch.cat([X, Y]), 2 * nbytes(X, Y)),
    ("aten::_foreach_add_", lambda: torch._foreach_add_([X.clone(), ROW.clone()], 1.0), 2 * nbytes(X, ROW)),
    ("aten::_foreach_norm", lambda: torch._foreach_norm([X, ROW]), nbytes(X, ROW)),
]


@pytest.mark.parametrize("name, call, expected", MOVED, ids=[name for name, *_ in MOVED])
def test_an_operator_moves_what_it_reads_and_writes(name: str, call: Callable[[], Any], expected: int, tmp_path: Path):
    assert least_bytes(name, traced_inputs(call, name, tmp_path), TensorListFacts(item_bytes=4)) == expected


@pytest.mark.parametrize("many", [False, True])
def test_an_optimizer_reads_four_tensors_and_writes_three(many: bool, tmp_path: Path) -> None:
    """Of more than 30 tensors a trace has no shapes."""
    parameters = [torch.nn.Parameter(torch.randn(8, 3)) for _ in range(40 if many else 3)]
    for parameter in parameters:
        parameter.grad = torch.randn(8, 3)
    optimizer = torch.optim.AdamW(parameters, fused=True)
    optimizer.step()
    given = traced_inputs(optimizer.step, "aten::_fused_adamw_", tmp_path)
    assert is_cut(given) == many
    all_bytes = nbytes(*parameters)
    moved_bytes = least_bytes("aten::_fused_adamw_", given, TensorListFacts(elements=all_bytes // 4, item_bytes=4))
    # Parameter, gradient and two states are read, three of them written.
    assert moved_bytes == 7 * all_bytes
    assert least_bytes("aten::_fused_adamw_", given, TensorListFacts()) is None


def test_unknown_operators_have_no_bytes_or_products() -> None:
    given = Inputs([[8, 8]], ["float"], [])
    assert least_bytes("aten::linear", given, TensorListFacts()) is None
    assert least_bytes("mine::add", given, TensorListFacts()) is None
    assert least_bytes("aten::add", Inputs([[8, 8]], ["c10::QInt8"], []), TensorListFacts()) is None
    assert least_bytes("triton_poi_fused_add_0", given, TensorListFacts()) == 256
    given = Inputs([[8, 8], [8, 8]], ["float", "float"], [])
    assert product_of("aten::add", given) is None
    assert product_of("aten::mm", Inputs([[8], []], ["float", "float"], [])) is None


def attention() -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(Q, Q, Q)


MULTIPLIED: list[tuple[str, Callable[[], Any], tuple[int, ...]]] = [
    ("aten::mm", lambda: X @ Y.T, (1, 32, 32, 48)),
    ("aten::addmm", lambda: torch.addmm(torch.zeros(32), X, Y.T), (1, 32, 32, 48)),
    ("aten::bmm", lambda: torch.bmm(Q[0], Q[0].mT), (4, 16, 16, 8)),
    ("aten::_scaled_dot_product_flash_attention_for_cpu", attention, (1, 0, 0, 0)),
]


@pytest.mark.parametrize("name, call, shape", MULTIPLIED, ids=[name for name, *_ in MULTIPLIED])
def test_a_product_has_torchs_flops(name: str, call: Callable[[], Any], shape: tuple[int, ...], tmp_path: Path) -> None:
    product = product_of(name, traced_inputs(call, name, tmp_path))
    if "attention" in name:
        expected = 2 * 2 * 2 * 4 * 16 * 16 * 8  # torch counts none on the CPU
    else:
        with FlopCounterMode(display=False) as counter:
            call()
        expected = counter.get_total_flops()
    assert (product.flops, product.dtype, *product[2:]) == (expected, "float32", *shape)


def test_causal_attention_has_half_the_flops(tmp_path: Path) -> None:
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    query = Q.clone().requires_grad_()

    def both() -> None:
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()

    forward = product_of(name, traced_inputs(both, name, tmp_path))
    backward = product_of(f"{name}_backward", traced_inputs(both, f"{name}_backward", tmp_path))
    whole = product_of(name, traced_inputs(attention, name, tmp_path))
    assert (2 * forward.flops, backward.flops) == (whole.flops, whole.flops)


def fused_attention_schemas() -> list[Any]:
    """The schemas of torch's operators that are shown as attention, without overloads for quantized factors."""
    schemas = []
    for schema in torch._C._jit_get_all_schemas():
        names = {argument.name for argument in schema.arguments}
        is_attention = operator_kind(schema.name) == "attention" and names & {"is_causal", "custom_mask_type"}
        if is_attention and not schema.overload_name and not schema.name.endswith("_inplace"):
            schemas.append(schema)
    return sorted(schemas, key=lambda schema: schema.name)


@pytest.mark.parametrize("schema", fused_attention_schemas(), ids=lambda schema: schema.name)
def test_only_the_argument_for_a_causal_mask_halves_attention(schema: Any) -> None:
    """Other flags, such as ``compute_log_sumexp``, are True in training."""

    def flops(causal: bool) -> int:
        mask = {"is_causal": str(causal), "custom_mask_type": "1" if causal else "0"}
        values = []
        for argument in schema.arguments:
            other = "True" if str(argument.type) == "bool" else "2"
            values.append(mask.get(argument.name, other))
        return product_of(schema.name, Inputs([[2, 4, 16, 8]] * 4, ["float"] * 4, values)).flops

    assert flops(causal=False) == 2 * flops(causal=True)
