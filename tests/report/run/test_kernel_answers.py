"""The answers are those that can be worked out by hand from a small table."""

from __future__ import annotations

from typing import Any

from lm_profiler.record.kernels import KernelRow, KernelTable, KindTime, PhaseKernels, Rest
from lm_profiler.report.run.kernel_answers import kernel_answers

STEPS = 2


def row(phase: str, kind: Any, name: str, module: str | None, type_: str | None, count: int, ms: float) -> KernelRow:
    """``count`` and ``ms`` are of one step."""
    return KernelRow(
        phase=phase,
        kind=kind,
        name=name,
        operator=None,
        module=module,
        module_type=type_,
        count=count * STEPS,
        total_s=ms * 1e-3 * STEPS,
    )


def table(*rows: KernelRow, idle_ms: float = 0.0) -> KernelTable:
    """Of ``rows``, and ``idle_ms`` more in each phase's step."""
    phases = {}
    for phase in dict.fromkeys(row.phase for row in rows):
        kinds: dict[Any, KindTime] = {}
        for each in (row for row in rows if row.phase == phase):
            before = kinds.get(each.kind, KindTime(count=0, total_s=0.0))
            kinds[each.kind] = KindTime(count=before.count + each.count, total_s=before.total_s + each.total_s)
        busy_s = sum(time.total_s for time in kinds.values())
        phases[phase] = PhaseKernels(busy_s=busy_s, idle_s=idle_ms * 1e-3 * STEPS, overlap_s=0.0, kinds=kinds)
    return KernelTable(
        source="kernels",
        steps=STEPS,
        window_s=sum(phase.busy_s + phase.idle_s for phase in phases.values()),
        phases=phases,
        rows=list(rows),
        rest=Rest(rows=0, count=0, total_s=0.0),
        memory_bound_share=None,
        communication_share=None,
    )


WRITTEN_OUT = (
    row("forward", "matmul", "gemm", "blocks.*.attention.query", "Linear", 3, 2.0),
    row("forward", "matmul", "gemm", "blocks.*.attention", "SelfAttention", 2, 1.0),
    row("forward", "softmax", "softmax", "blocks.*.attention", "SelfAttention", 1, 0.5),
    row("forward", "softmax", "softmax", None, None, 1, 3.5),  # the loss's: not inside attention
    row("forward", "elementwise", "add", None, None, 4, 2.5),
    row("backward", "elementwise", "add", None, None, 5, 6.0),
    row("backward", "matmul", "gemm", "blocks.*.attention", "SelfAttention", 6, 3.5),
)


def test_the_largest_kernel_of_a_pass_is_added_up_over_its_callers() -> None:
    answers = dict(kernel_answers(table(*WRITTEN_OUT, idle_ms=0.5)))
    assert answers["largest in forward"] == "softmax: 4.000 ms, 40.0% of it, 2 calls of 2,000 µs"
    assert answers["largest in backward"] == "add: 6.000 ms, 60.0% of it, 5 calls of 1,200 µs"


def test_it_says_where_backward_has_the_same_largest_kernel() -> None:
    answers = dict(kernel_answers(table(WRITTEN_OUT[0], WRITTEN_OUT[6])))
    assert answers["largest in backward"] == "again gemm: 3.500 ms, 100.0% of it, 6 calls of 583 µs"


def test_the_share_of_matrix_products_is_of_inference_and_of_training() -> None:
    answers = dict(kernel_answers(table(*WRITTEN_OUT, idle_ms=0.5)))
    assert answers["matrix products"] == "30.0% of forward, 35.0% of backward, 32.5% of the step"


def test_softmax_inside_attention_is_held_against_its_own_products() -> None:
    answers = dict(kernel_answers(table(*WRITTEN_OUT)))
    assert answers["attention, forward"] == (
        "softmax 0.500 ms; products of scores and values 1.000 ms; projections 2.000 ms; "
        "softmax takes 0.50 times as long as those products"
    )
    assert answers["attention, backward"] == "products of scores and values 3.500 ms"


def test_fused_attention_cannot_be_taken_apart() -> None:
    fused = row("forward", "attention", "flash_fwd", "blocks.*.attention", "SelfAttention", 1, 1.0)
    answers = dict(kernel_answers(table(fused, WRITTEN_OUT[4])))
    assert answers["attention, forward"] == "softmax and products fused 1.000 ms"
    assert answers["matrix products"].endswith("another 28.6% of forward, 28.6% of the step")


def test_a_model_without_attention_is_not_asked_about_it() -> None:
    assert dict(kernel_answers(table(WRITTEN_OUT[4]))).keys() == {"largest in forward", "matrix products"}
