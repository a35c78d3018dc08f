"""The Kernels view shows the figures of the tables beside the run's traces, of one step."""

import json
from pathlib import Path
from typing import Any

import pytest
from made_parts import made_kernel, made_kernels, made_phase
from made_runs import made_entry
from served import write_trace
from shown import block_titled, blocks_of_kind, blocks_of_view, series_of, table_rows, text_of

from lm_profiler.record.kernels import KernelTable, Rest

ROWS = [
    made_kernel(*figures, operator="aten::mm") for figures in (("void at::native::gemm", 4, 0.40), ("small", 2, 0.02))
]
PHASES = {"forward": made_phase(0.4, 0.1, 0.02, matmul=(4, 0.42))}
SHARES = {"memory_bound_share": 0.25, "communication_share": 0.0}
TABLE = made_kernels(ROWS, PHASES, 0.5, rest=Rest(rows=1, count=1, total_s=0.01), **SHARES)


def entry_with_tables(folder: Path, *tables: KernelTable, **options: Any) -> Any:
    entry = made_entry(folder / "run", **options)
    (entry.folder / "trace").mkdir()
    for rank, table in enumerate(tables):
        table.write(entry.folder / "trace" / f"rank{rank}.kernels.json")
    return entry


def test_the_view_shows_where_the_time_went(tmp_path: Path) -> None:
    """In each of two steps, forward has matmuls of 200 and 10 ms, 10 ms of them at the same time, and 50 ms idle."""
    blocks = blocks_of_view("kernels", entry_with_tables(tmp_path, TABLE))
    series = series_of(block_titled(blocks, "Time by phase and kind"))
    assert {name: drawn["x"] for name, drawn in series.items()} == {"matmul": [210, 210], "idle": [50, 50]}
    assert series["matmul"]["y"] == ["forward", "step"]
    assert "84.0% of forward" in series["matmul"]["customdata"][0]
    assert "10.000 ms of a step ran at the same time as other work" in text_of(blocks)
    answers = dict(table_rows(block_titled(blocks, "Answers"))[1:])
    assert "80.0% of forward" in answers["largest in forward"]
    assert answers["bound by memory"].startswith("25.0%")
    largest = block_titled(blocks, "Largest kernels")
    titles, first, _ = table_rows(largest)
    row = dict(zip(titles, first, strict=True))
    expected = {"kernel": "gemm", "phase": "forward", "kind": "matmul", "calls": "2", "ms": "200.000", "share": "80.0%"}
    assert {title: row[title] for title in expected} == expected
    [table] = blocks_of_kind([largest], "long table")
    assert table["values"][str(titles.index("ms"))] == pytest.approx([0.2, 0.01])
    assert table["sorted_by"] == "ms"
    assert "1 smaller rows are not shown (together 5.000 ms)" in text_of([largest])


def test_tables_of_ranks_are_in_order(tmp_path: Path) -> None:
    entry = entry_with_tables(tmp_path, TABLE)
    for rank in (2, 10):
        TABLE.write(entry.folder / "trace" / f"rank{rank}.kernels.json")
    (entry.folder / "trace" / "rank1.kernels.json").write_text("{")
    [choice] = blocks_of_view("kernels", entry)
    assert [rank["title"] for rank in choice["choices"]] == ["rank 0", "rank 1", "rank 2", "rank 10"]
    damaged = choice["choices"][1]["blocks"]
    assert "rank1.kernels.json" in text_of(damaged)


def test_kinds_of_a_later_version_are_drawn(tmp_path: Path) -> None:
    later = json.loads(TABLE.model_dump_json())
    later["phases"]["melting"] = json.loads(json.dumps(later["phases"]["forward"]).replace("matmul", "melted"))
    entry = entry_with_tables(tmp_path, TABLE)
    (entry.folder / "trace" / "rank0.kernels.json").write_text(json.dumps(later))
    series = series_of(block_titled(blocks_of_view("kernels", entry), "Time by phase and kind"))
    assert series["melted"]["y"] == ["forward", "melting", "step"]
    assert series["melted"]["x"] == [0, 210, 210]


def test_a_run_without_kernels_has_a_reason(tmp_path: Path) -> None:
    untabled = made_entry(tmp_path / "untabled")
    write_trace(untabled.folder)
    whys = {
        "untraced": text_of(blocks_of_view("kernels", made_entry(tmp_path / "untraced"))),
        "untabled": text_of(blocks_of_view("kernels", untabled)),
        "died": text_of(blocks_of_view("kernels", made_entry(tmp_path / "died", status="oom"))),
    }
    assert "--trace.steps" in whys["untraced"]
    assert "no table" in whys["untabled"]
    assert "oom" in whys["died"]
