"""The answers are those that can be worked out by hand from a small table."""

from typing import Any

from made_parts import made_kernel, made_kernels, made_phase
from stored_texts import assert_stored

from lm_profiler.record.kernels import KernelRow, KernelTable, KindTime, PhaseKernels, Rest
from lm_profiler.report.run.kernel_tables import kernel_answers, kernel_rows, kernel_tables, kind_rows
from lm_profiler.report.tables.formats import render

STEPS = 2


def kernel_row(
    phase: str, kind: Any, name: str, module: str | None, type_: str | None, count: int, ms: float
) -> KernelRow:
    """``count`` and ``ms`` are of one step."""
    facts = {"phase": phase, "kind": kind, "module": module, "module_type": type_}
    return made_kernel(name, count * STEPS, ms * 1e-3 * STEPS, **facts)


def table_of(*rows: KernelRow, idle_ms: float = 0.0) -> KernelTable:
    """Of ``rows``, and ``idle_ms`` more in each phase's step."""
    phases = {}
    for phase in dict.fromkeys(row.phase for row in rows):
        kinds: dict[Any, KindTime] = {}
        for row in rows:
            if row.phase != phase:
                continue
            before = kinds.get(row.kind, KindTime(count=0, total_s=0.0))
            kinds[row.kind] = KindTime(count=before.count + row.count, total_s=before.total_s + row.total_s)
        busy_s = sum(time.total_s for time in kinds.values())
        phases[phase] = PhaseKernels(busy_s=busy_s, idle_s=idle_ms * 1e-3 * STEPS, overlap_s=0.0, kinds=kinds)
    return made_kernels([*rows], phases, sum(phase.busy_s + phase.idle_s for phase in phases.values()))


WRITTEN_OUT = (
    kernel_row("forward", "matmul", "gemm", "blocks.*.attention.query", "Linear", 3, 2.0),
    kernel_row("forward", "matmul", "gemm", "blocks.*.attention", "SelfAttention", 2, 1.0),
    kernel_row("forward", "softmax", "softmax", "blocks.*.attention", "SelfAttention", 1, 0.5),
    kernel_row("forward", "softmax", "softmax", None, None, 1, 3.5),  # the loss's: not inside attention
    kernel_row("forward", "elementwise", "add", None, None, 4, 2.5),
    kernel_row("backward", "elementwise", "add", None, None, 5, 6.0),
    kernel_row("backward", "matmul", "gemm", "blocks.*.attention", "SelfAttention", 6, 3.5),
)


CASES = {
    # softmax is added up over its callers; softmax inside attention is held against attention's own products
    "attention written out": table_of(*WRITTEN_OUT, idle_ms=0.5),
    "backward has the same largest kernel": table_of(WRITTEN_OUT[0], WRITTEN_OUT[6]),
    "fused attention cannot be taken apart": table_of(
        kernel_row("forward", "attention", "flash_fwd", "blocks.*.attention", "SelfAttention", 1, 1.0), WRITTEN_OUT[4]
    ),
    "without attention": table_of(WRITTEN_OUT[4]),
}


def test_the_answers_are_as_stored() -> None:
    """10 ms traced against 8 ms timed; 5 FLOPs a score against 2 · 2 · 64."""
    answers = dict(kernel_answers(CASES["attention written out"], forward_s=8e-3, head_width=64))
    assert "1.25 times" in answers["forward in total"]
    assert "0.020 times their FLOPs" in answers["attention, forward"]
    answers = {case: [f"{about}: {text}" for about, text in kernel_answers(table)] for case, table in CASES.items()}
    assert_stored("report/kernel_answers", answers)


NAME = "void at::native::(anonymous namespace)::softmax_warp_forward<float, float, float, 9, false, false>(float*)"
SOFTMAX = {"operator": "aten::_softmax", "module": "model.blocks.*.attention", "module_type": "SelfAttention"}
TABLE = made_kernels(
    [made_kernel(NAME, 4, 0.002, kind="softmax", **SOFTMAX)],
    {
        "forward": made_phase(0.012, 0.002, matmul=(8, 0.01), softmax=(4, 0.002)),
        "backward": made_phase(0.005, 0.001, matmul=(16, 0.005)),
    },
    window_s=0.02,
    rest=Rest(rows=7, count=24, total_s=0.015),
    memory_bound_share=0.1,
    communication_share=0.0,
)
"""Of two steps: 10 ms of products in forward, 5 ms in backward, 2 ms of softmax, 3 ms idle."""


def printed_rows(table: KernelTable) -> list[list[str]]:
    return [line.split() for line in render(kernel_tables(table), "terminal").splitlines()]


def test_kinds_by_phase_are_milliseconds_of_one_step() -> None:
    """Over two steps, products took 10 ms in forward and 5 in backward, a softmax 2, and the device idled 2 and 1."""
    _, *kinds_by_phase = printed_rows(TABLE)
    assert kinds_by_phase[:5] == [
        ["phase", "matmul", "softmax", "idle", "busy", "+", "idle"],
        ["forward", "5.000", "1.000", "1.000", "7.000"],
        ["backward", "2.500", "0.500", "3.000"],
        ["step", "7.500", "1.000", "1.500", "10.000"],
        ["share", "75.0%", "10.0%", "15.0%"],
    ]
    assert kind_rows(TABLE)[:3] == [
        {"phase": "forward", "kind": "matmul", "calls": 4.0, "time_s": 0.005, "share": 0.5},
        {"phase": "forward", "kind": "softmax", "calls": 2.0, "time_s": 0.001, "share": 0.1},
        {"phase": "forward", "kind": "idle", "calls": None, "time_s": 0.001, "share": 0.1},
    ]


def test_kernels_are_milliseconds_of_one_step() -> None:
    """Over two steps four calls of a softmax took 2 ms, and seven other rows 15 ms. Namespaces are left out."""
    (softmax,) = [row for row in printed_rows(TABLE) if row[:1] and row[0].startswith("softmax_warp_")]
    where = ["forward", "softmax", "aten::_softmax", "model.blocks.*.attention"]
    assert softmax[-8:] == [*where, "2", "1.000", "500.0", "10.0%"]
    assert " ".join(printed_rows(TABLE)[8]) == "7 smaller rows are not shown (together 7.500 ms)"
    (row,) = kernel_rows(TABLE)
    assert (row["name"], row["calls"], row["share"]) == (NAME, 2.0, 0.1)
    assert (row["time_s"], row["mean_s"]) == (0.001, 0.0005)


def test_rows_beyond_the_first_fifteen_are_summed_up() -> None:
    """Two of 17 rows, of 1 ms each, are among the nine that are not shown."""
    seventeen_rows = TABLE.model_copy(update={"rows": TABLE.rows * 17})
    text = " ".join(printed_rows(seventeen_rows)[22])
    assert text == "9 smaller rows are not shown (together 9.500 ms)"


def test_a_table_of_operators_has_other_titles() -> None:
    first, header, *rest = printed_rows(TABLE.model_copy(update={"source": "operators"}))
    assert first[:4] == ["operators", "on", "the", "host,"]
    assert header[3:5] == ["no", "operator"]
    assert rest[4][:3] == ["operator", "phase", "kind"]
