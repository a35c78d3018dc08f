"""The table of kernels on disk."""

from pathlib import Path

from made_parts import made_kernel, made_kernels, made_phase
from raised import refusal
from stored_texts import assert_stored

from lm_profiler.record.kernels import kernel_files, kernels_file, read_kernels
from lm_profiler.record.run_record import RecordError

ROWS = [made_kernel("ampere_sgemm_128x64_tn", 4, 0.3, operator="aten::mm")]
TABLE = made_kernels(ROWS, {"forward": made_phase(0.3, 0.2, matmul=(4, 0.3))}, 0.5, communication_share=0.25)


def test_tables_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = kernels_file(tmp_path / "rank3.pt.trace.json.gz")
    assert path == tmp_path / "rank3.kernels.json"
    TABLE.write(path)
    assert read_kernels(path) == TABLE
    (tmp_path / "trace").mkdir()
    for rank in (10, 2, 0):
        TABLE.write(kernels_file(tmp_path / "trace" / f"rank{rank}.pt.trace.json.gz"))
    (tmp_path / "trace" / "rank0.pt.trace.json.gz").touch()
    assert [path.name for path in kernel_files(tmp_path)] == [f"rank{n}.kernels.json" for n in (0, 2, 10)]
    assert kernel_files(tmp_path / "never ran") == []


def test_damaged_tables_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank0.kernels.json"
    messages = {"gone": refusal(RecordError, lambda: read_kernels(path))}
    contents = {"no text": b"\xff", "no JSON": b"{", "of a later version": b'{"schema_version": 2}'}
    for case, content in contents.items():
        path.write_bytes(content)
        messages[case] = refusal(RecordError, lambda: read_kernels(path))
    assert_stored("record/problems: no table of kernels", messages, run=tmp_path)
