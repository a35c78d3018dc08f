"""The table on the terminal, and its plain rows."""

from __future__ import annotations

from lm_profiler.record.kernels import KernelRow, KernelTable, KindTime, PhaseKernels, Rest
from lm_profiler.report.run.kernels import kernel_rows, kernel_tables, kind_rows
from lm_profiler.report.tables.formats import render

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
