"""The answers are those that can be worked out by hand from a small table."""

from __future__ import annotations

from typing import Any

from stored_texts import assert_stored

from lm_profiler.record.kernels import KernelRow, KernelTable, KindTime, PhaseKernels, Rest
from lm_profiler.report.run.kernel_tables import kernel_answers, kernel_rows, kernel_tables, kind_rows
from lm_profiler.report.tables.formats import render

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


def test_forward_is_held_against_its_timed_mean_and_softmax_against_flops() -> None:
    """10 ms traced against 8 ms timed; 5 FLOPs a score against 2 · 2 · 64."""
    said = dict(kernel_answers(CASES["attention written out"], forward_s=8e-3, head_width=64))
    assert "1.25 times" in said["forward in total"]
    assert "0.020 times their FLOPs" in said["attention, forward"]


def test_the_answers_are_as_stored() -> None:
    said = {case: [f"{about}: {text}" for about, text in kernel_answers(of)] for case, of in CASES.items()}
    assert_stored("report/kernel_answers", said)


NAME = "void at::native::(anonymous namespace)::softmax_warp_forward<float, float, float, 9, false, false>(float*)"
TABLE = KernelTable(
    source="kernels",
    steps=2,
    window_s=0.02,
    phases={
        "forward": PhaseKernels(
            busy_s=0.012,
            idle_s=0.002,
            overlap_s=0.0,
            kinds={"matmul": KindTime(count=8, total_s=0.01), "softmax": KindTime(count=4, total_s=0.002)},
        ),
        "backward": PhaseKernels(
            busy_s=0.005, idle_s=0.001, overlap_s=0.0, kinds={"matmul": KindTime(count=16, total_s=0.005)}
        ),
    },
    rows=[
        KernelRow(
            phase="forward",
            kind="softmax",
            name=NAME,
            operator="aten::_softmax",
            module="model.blocks.*.attention",
            module_type="SelfAttention",
            count=4,
            total_s=0.002,
        )
    ],
    rest=Rest(rows=7, count=24, total_s=0.015),
    memory_bound_share=0.1,
    communication_share=0.0,
)


def printed(table: KernelTable) -> list[list[str]]:
    return [line.split() for line in render(kernel_tables(table), "terminal").splitlines()]


def test_kinds_by_phase_are_milliseconds_of_one_step() -> None:
    lines = printed(TABLE)
    assert lines[1:6] == [
        ["phase", "matmul", "softmax", "idle", "busy", "+", "idle"],
        ["forward", "5.000", "1.000", "1.000", "7.000"],
        ["backward", "2.500", "0.500", "3.000"],
        ["step", "7.500", "1.000", "1.500", "10.000"],
        ["share", "75.0%", "10.0%", "15.0%"],
    ]


def test_the_largest_kernels_follow_with_calls_mean_share_and_module() -> None:
    lines = printed(TABLE)
    assert lines[7][0].startswith("softmax_warp_")  # without the namespaces
    where = ["forward", "softmax", "aten::_softmax", "model.blocks.*.attention"]
    assert lines[7][-8:] == [*where, "2", "1.000", "500.0", "10.0%"]
    assert lines[8] == ["7", "smaller", "rows", "are", "not", "shown,", "7.500", "ms"]


def test_rows_that_are_not_shown_are_counted_whoever_left_them_out() -> None:
    lines = printed(TABLE.model_copy(update={"rows": TABLE.rows * 17}))
    assert lines[22] == ["9", "smaller", "rows", "are", "not", "shown,", "9.500", "ms"]  # two of ours, 1 ms each


def test_without_a_device_the_words_say_so() -> None:
    first, header, *rest = printed(TABLE.model_copy(update={"source": "operators"}))
    assert first[:4] == ["operators", "on", "the", "host,"]
    assert header[3:5] == ["no", "operator"]
    assert rest[5 - 1][:3] == ["operator", "phase", "kind"]


def test_plain_rows_are_of_one_step() -> None:
    assert kind_rows(TABLE)[:3] == [
        {"phase": "forward", "kind": "matmul", "calls": 4.0, "time_s": 0.005, "share": 0.5},
        {"phase": "forward", "kind": "softmax", "calls": 2.0, "time_s": 0.001, "share": 0.1},
        {"phase": "forward", "kind": "idle", "calls": None, "time_s": 0.001, "share": 0.1},
    ]
    (row,) = kernel_rows(TABLE)
    assert (row["name"], row["calls"], row["time_s"], row["mean_s"], row["share"]) == (NAME, 2.0, 0.001, 0.0005, 0.1)
