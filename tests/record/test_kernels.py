"""The table of kernels on disk."""

from __future__ import annotations

from pathlib import Path

from raised import refusal
from stored_texts import assert_stored

from lm_profiler.record.kernels import (
    KernelRow,
    KernelTable,
    KindTime,
    PhaseKernels,
    Rest,
    kernel_files,
    kernels_file,
    read_kernels,
)
from lm_profiler.record.run_record import RecordError

TABLE = KernelTable(
    source="kernels",
    steps=2,
    window_s=0.5,
    phases={
        "forward": PhaseKernels(busy_s=0.3, idle_s=0.2, overlap_s=0.0, kinds={"matmul": KindTime(count=4, total_s=0.3)})
    },
    rows=[
        KernelRow(
            phase="forward",
            kind="matmul",
            name="ampere_sgemm_128x64_tn",
            operator="aten::mm",
            module=None,
            module_type=None,
            count=4,
            total_s=0.3,
        )
    ],
    rest=Rest(rows=0, count=0, total_s=0.0),
    memory_bound_share=None,
    communication_share=0.25,
)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = kernels_file(tmp_path / "rank3.pt.trace.json.gz")
    assert path == tmp_path / "rank3.kernels.json"
    TABLE.write(path)
    assert read_kernels(path) == TABLE


def test_a_run_has_one_for_each_rank(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    for rank in (10, 2, 0):
        TABLE.write(kernels_file(tmp_path / "trace" / f"rank{rank}.pt.trace.json.gz"))
    (tmp_path / "trace" / "rank0.pt.trace.json.gz").touch()
    assert [path.name for path in kernel_files(tmp_path)] == [f"rank{n}.kernels.json" for n in (0, 2, 10)]
    assert kernel_files(tmp_path / "never ran") == []


def test_what_is_no_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rank0.kernels.json"
    said = {"gone": refusal(RecordError, lambda: read_kernels(path))}
    contents = {"no text": b"\xff", "no JSON": b"{", "of a later version": b'{"schema_version": 2}'}
    for case, content in contents.items():
        path.write_bytes(content)
        said[case] = refusal(RecordError, lambda: read_kernels(path))
    assert_stored("record/problems: no table of kernels", said, run=tmp_path)
