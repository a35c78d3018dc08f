"""How much of a file is read stands in one line of a terminal, and nowhere else."""

import gzip
import io
import json
from pathlib import Path

import pytest
from cuda_trace import cuda_step

from lm_profiler.analysis.trace.any_trace import read_any_trace
from lm_profiler.cli.reading_line import ReadingLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_is_rewritten_every_few_seconds(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(bytes(1000))
    terminal, pipe = Terminal(), io.StringIO()
    now_s = iter([0.0, 1.0, 2.5, 3.0, 5.0])
    line = ReadingLine(path, terminal, lambda: next(now_s))
    for bytes_read in (100, 250, 300, 1000):
        line.draw(bytes_read)
    line.erase()
    start = "\r\x1b[K"
    assert terminal.getvalue() == f"{start}reading trace.json: 25%{start}reading trace.json: 100%{start}"
    quiet = ReadingLine(path, pipe, lambda: 0.0)
    quiet.draw(1000)
    quiet.erase()
    assert pipe.getvalue() == ""


@pytest.mark.parametrize("is_compressed", [False, True])
def test_positions_in_a_trace_grow_up_to_the_size_of_its_file(tmp_path: Path, is_compressed: bool) -> None:
    content = json.dumps({"traceEvents": cuda_step() * 100}).encode()
    assert len(content) > 2 * 2**16
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.compress(content) if is_compressed else content)
    positions: list[int] = []
    read_any_trace(path, report_position=positions.append)
    assert len(positions) > 1
    assert positions == sorted(positions)
    assert positions[-1] == path.stat().st_size
