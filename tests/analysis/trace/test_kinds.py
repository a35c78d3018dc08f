"""Kinds by name; the names of kernels are from published profiles (kernel_kinds.txt)."""

from collections import defaultdict
from pathlib import Path

import pytest

from lm_profiler.analysis.trace.kinds import kernel_kind, operator_kind

NAMES = Path(__file__).parent / "kernel_kinds.txt"

OPERATORS = {
    "matmul": ["aten::mm", "aten::bmm", "aten::addmm", "aten::_scaled_mm", "aten::mkldnn_convolution"],
    "attention": ["aten::_scaled_dot_product_flash_attention_for_cpu", "flash_attn::_flash_attn_forward"],
    "softmax": ["aten::_softmax", "aten::_log_softmax_backward_data"],
    "normalization": ["aten::native_layer_norm", "aten::_fused_rms_norm", "aten::native_layer_norm_backward"],
    "elementwise": ["aten::add_", "aten::_foreach_mul_", "aten::silu_backward", "aten::_fused_adamw_"],
    "reduction": ["aten::sum", "aten::_foreach_norm", "aten::linalg_vector_norm", "aten::nll_loss_forward"],
    "copies": ["aten::copy_", "aten::cat", "aten::index_select", "aten::embedding_dense_backward"],
    "communication": ["c10d::allreduce_", "nccl:all_reduce", "_c10d_functional::all_gather_into_tensor"],
    # What only calls others, or moves no byte.
    "other": ["aten::linear", "aten::softmax", "aten::view", "MmBackward0", "aten::empty", "aten::matmul"],
}


def published_kernels() -> dict[str, list[tuple[str, str | None]]]:
    """The names of the file, each with the operator that launched it if the file has one, by kind."""
    kernels: dict[str, list[tuple[str, str | None]]] = defaultdict(list)
    kind = ""
    for line in NAMES.read_text("utf-8").splitlines():
        if line.startswith("== "):
            kind = line.removeprefix("== ")
        elif not line.startswith("#"):
            name, _, operator = line.partition("\t")
            kernels[kind].append((name, operator or None))
    return kernels


KERNELS = published_kernels()


@pytest.mark.parametrize("kind", KERNELS)
def test_published_kernels_have_their_kind(kind: str) -> None:
    kinds = {name: kernel_kind(name, operator) for name, operator in KERNELS[kind]}
    assert {name: found for name, found in kinds.items() if found != kind} == {}


@pytest.mark.parametrize("kind, name", [(kind, name) for kind, names in OPERATORS.items() for name in names])
def test_operators_have_their_kind(kind: str, name: str) -> None:
    assert operator_kind(name) == kind


def test_a_kernel_with_an_unknown_name_has_the_kind_of_its_operator() -> None:
    assert kernel_kind("my_own_kernel", "aten::mm") == "matmul"
    assert kernel_kind("ampere_sgemm_128x64_tn", "aten::add_") == "matmul"
    assert kernel_kind("_fwd_kernel", "flash_attn::_flash_attn_forward") == "attention"
    assert kernel_kind("_fwd_kernel", "flashinfer::rmsnorm") == "other"
