"""The layout of kernels: the tables of published reports, of traces reckoned by hand."""

from pathlib import Path

from cuda_trace import Trace, kernel_table
from made_runs import made_entry

from lm_profiler.record.entry import Entry
from lm_profiler.record.kernels import kernels_file
from lm_profiler.report.tables.kernel_layout import kernel_layout
from lm_profiler.report.tables.table import Table

GEMM, SOFTMAX, ADD = "ampere_sgemm_128x64_tn", "softmax_warp_forward", "vectorized_elementwise_kernel<4, add>"


def traced_entry(folder: Path, context: int, verb: str, softmax_us: float, size: str = "small") -> Entry:
    """One step: 60 us of a matmul and a softmax in forward; in training 40 us of adding in backward too."""
    trace = Trace()
    end = 60 + softmax_us + 60
    trace.range("ProfilerStep#1", 0, end)
    trace.range("phase: forward", 0, 20)
    trace.operator("aten::mm", 1, 3)
    trace.work(GEMM, 2, 10, 70, 1)
    trace.operator("aten::_softmax", 4, 6)
    trace.work(SOFTMAX, 5, 70, 70 + softmax_us, 2)
    if verb == "fit":
        trace.range("phase: backward", 20, 30)
        trace.operator("aten::add", 21, 23)
        trace.work(ADD, 22, 70 + softmax_us, 110 + softmax_us, 3)
    options = {"model.size": size, "data.context_length": str(context)}
    entry = made_entry(folder, options, verb=verb)
    (folder / "trace").mkdir()
    kernel_table(trace.events).write(kernels_file(folder / "trace" / "rank0.pt.trace.json.gz"))
    return entry


def shown_rows(table: Table) -> list[list[str]]:
    return [table.titles, *([cell.text for cell in row] for row in table.rows)]


def test_the_tables_of_a_report_about_kernels(tmp_path: Path) -> None:
    """Of luke396/assignment2-systems: GEMM fraction by context, top kernel per pass, top kernel that is no GEMM."""
    entries = [
        traced_entry(tmp_path / "a", 128, "validate", 20),
        traced_entry(tmp_path / "b", 128, "fit", 20),
        traced_entry(tmp_path / "c", 256, "validate", 60),
        made_entry(tmp_path / "d", {"data.context_length": "256"}, status="oom"),
        made_entry(tmp_path / "e", {"data.context_length": "512"}),
        traced_entry(tmp_path / "f", 128, "fit", 20, size="medium"),
    ]
    tables = kernel_layout(entries)
    assert [table.title.partition(":")[0] for table in tables] == ["small"] * 3 + ["medium"] * 3
    assert shown_rows(tables[0]) == [
        ["context", "inference", "training"],
        ["128", "75.0%", "50.0%"],
        ["256", "50.0%", "OOM"],
        ["512", "", "no trace"],
    ]
    assert shown_rows(tables[1])[:3] == [
        ["context", "inference forward", "training forward", "training backward"],
        ["128", f"{GEMM} (75.0%)", f"{GEMM} (75.0%)", f"{ADD} (100.0%)"],
        ["256", f"{GEMM} (50.0%)", "OOM", "OOM"],
    ]
    assert shown_rows(tables[2]) == [
        ["context", "kernel", "share", "ms per step", "calls per step"],
        ["128", SOFTMAX, "25.0%", "0.02", "1"],
        ["256", SOFTMAX, "50.0%", "0.06", "1"],
        ["512", "no trace", "", "", ""],
    ]
    assert shown_rows(tables[3])[1] == ["128", "", "50.0%"]
