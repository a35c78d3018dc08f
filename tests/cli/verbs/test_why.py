"""The verb ``why`` as it is called: its formats, and what it refuses."""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import pytest
from cuda_trace import Trace, cuda_step
from refused import assert_refused_as_stored

from lm_profiler.cli.main import main
from lm_profiler.record.trace_answer import TraceAnswer, TraceComparison, TraceRanks


def written_trace(path: Path, events: Sequence[Any], **header: Any) -> str:
    path.write_text(json.dumps({**header, "traceEvents": list(events)}))
    return str(path)


def test_answers_about_one_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trace = written_trace(tmp_path / "a.json", cuda_step())
    assert main(["why", trace]) == 0
    text = capsys.readouterr().out
    assert "0.170 ms per step" in text
    assert "ncclDevKernel_AllReduce" in text or "all_reduce" in text
    assert main(["why", trace, "--output", str(tmp_path / "a.md")]) == 0
    assert "| collective" in (tmp_path / "a.md").read_text()
    assert main(["why", trace, "--format", "json"]) == 0
    answer = TraceAnswer.model_validate_json(capsys.readouterr().out)
    assert answer.kernels.window_s == pytest.approx(170e-6)
    (tmp_path / "trace").mkdir()
    written_trace(tmp_path / "trace" / "rank0.pt.trace.json.gz", cuda_step())
    assert main(["why", str(tmp_path), "--format", "json"]) == 0
    assert TraceAnswer.model_validate_json(capsys.readouterr().out).steps == 1
    trace = Trace()
    trace.range("schritt ä 名", 0, 100)
    trace.work("kernel_名_ä", 2, 10, 60, 1)
    path = written_trace(tmp_path / "spur ä.json", trace.events)
    assert main(["why", path, "--step", "schritt ä 名"]) == 0
    assert "kernel_名_ä" in capsys.readouterr().out


def test_two_traces_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    ranks = []
    for rank in (0, 1):
        info = {"rank": rank, "world_size": 2}
        events = cuda_step(all_reduce_us=30 + 20 * rank)
        ranks.append(written_trace(tmp_path / f"rank{rank}.json", events, distributedInfo=info))
    assert main(["why", *ranks, "--format", "json"]) == 0
    answer = TraceRanks.model_validate_json(capsys.readouterr().out)
    assert answer.ranks[1].waited_s == pytest.approx(20e-6)  # rank 0 came last
    assert main(["why", *ranks, "--ranks=false", "--format", "json"]) == 0
    comparison = TraceComparison.model_validate_json(capsys.readouterr().out)
    assert comparison.b.step_s - comparison.a.step_s == pytest.approx(20e-6)
    for words in (ranks, [*ranks, "--ranks=false"]):
        assert main(["why", *words]) == 0
        assert "ms" in capsys.readouterr().out


def test_the_processes_of_one_file_are_shown_one_by_one_or_as_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    events = cuda_step()
    for event in cuda_step(all_reduce_us=50):  # as sglang merges the traces of ranks
        process = "[TP01] 0" if event["pid"] == 0 else "[TP01] 42"
        events.append({**event, "pid": process})
    merged = written_trace(tmp_path / "merged.json", events)
    assert main(["why", merged]) == 0
    assert "the work of 2 processes" in capsys.readouterr().out
    assert main(["why", merged, "--process", "[TP01] 42", "--format", "json"]) == 0
    answer = TraceAnswer.model_validate_json(capsys.readouterr().out)
    assert (answer.process, answer.rank) == ("[TP01] 42", None)
    assert answer.kernels.window_s == pytest.approx(190e-6)
    assert main(["why", merged, "--ranks", "--format", "json"]) == 0
    ranks = TraceRanks.model_validate_json(capsys.readouterr().out)
    assert ranks.ranks[1].waited_s == pytest.approx(20e-6)


def test_the_page_has_no_script(tmp_path: Path) -> None:
    trace = Trace()
    trace.range("ProfilerStep#1", 0, 100)
    name = "<script>alert(1)</script>&kernel"
    trace.work(name, 2, 10, 60, 1)
    path, page = written_trace(tmp_path / "a.json", trace.events), tmp_path / "why.html"
    assert main(["why", path, "--output", str(page)]) == 0
    text = page.read_text("utf-8")
    assert f">{escape(name)}</td>" in text
    assert ">0.050</td>" in text
    assert "<script" not in text


def test_unanswerable_questions_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = json.dumps({"traceEvents": cuda_step()})
    Path("cut.json").write_text(text[: len(text) // 2])
    Path("other.json").write_text("{}")
    Path("empty").mkdir()
    written_trace(Path("good.json"), cuda_step())
    processes = [{**event, "pid": 99} if event["pid"] != 0 else event for event in cuda_step()]
    written_trace(Path("two.json"), [*cuda_step(), *processes])
    named = [{**event, "pid": "rank\n1"} if event["pid"] != 0 else event for event in cuda_step()]
    written_trace(Path("line_break.json"), [*cuda_step(), *named])
    calls = [
        ["why"],
        ["why", "nothing.json"],
        ["why", "empty"],
        ["why", "cut.json"],
        ["why", "other.json"],
        ["why", "two.json"],
        ["why", "line_break.json"],
        ["why", "good.json", "--step", "training"],
        ["why", "good.json", "--ranks"],
        ["why", "good.json", "--process", "7"],
        ["why", "good.json", "good.json", "--process", "7"],
        ["why", "good.json", "good.json", "good.json", "--ranks=false"],
        ["why", "good.json", "--format", "html"],
    ]
    assert_refused_as_stored("cli/refused: why", calls, capsys)
