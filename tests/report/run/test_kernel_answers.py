"""The answers are those that can be worked out by hand from a small table."""

from __future__ import annotations

from typing import Any

from stored_texts import assert_stored

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


CASES = {
    # softmax is added up over its callers; softmax inside attention is held against attention's own products
    "attention written out": table(*WRITTEN_OUT, idle_ms=0.5),
    "backward has the same largest kernel": table(WRITTEN_OUT[0], WRITTEN_OUT[6]),
    "fused attention cannot be taken apart": table(
        row("forward", "attention", "flash_fwd", "blocks.*.attention", "SelfAttention", 1, 1.0), WRITTEN_OUT[4]
    ),
    "without attention": table(WRITTEN_OUT[4]),
}


def test_the_answers_are_as_stored() -> None:
    said = {case: [f"{about}: {text}" for about, text in kernel_answers(of)] for case, of in CASES.items()}
    assert_stored("report/kernel_answers", said)


def test_a_model_without_attention_is_not_asked_about_it() -> None:
    assert dict(kernel_answers(table(WRITTEN_OUT[4]))).keys() == {"largest in forward", "matrix products"}
