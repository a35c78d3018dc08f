"""What the routes answer, of runs made by hand: forward 3 ms, backward 5 ms, other 2 ms (see report/made_runs.py)."""

import json
import os
from argparse import Namespace
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from made_runs import made_entry
from made_waterfall import made_waterfall
from served import Get, get_from, write_trace
from shown import blocks_of_kind, text_of
from tensorboard.plugins.base_plugin import TBContext

from lm_profiler.cli.main import main
from lm_profiler.tensorboard.tab.plugin import LMProfilerPlugin


def test_the_tab_is_active_once_there_is_a_run(logdir: Path) -> None:
    [found] = entry_points(group="tensorboard_plugins", name="lm_profiler")
    assert found.load() is LMProfilerPlugin
    plugin = LMProfilerPlugin(TBContext(logdir=str(logdir)))
    assert not plugin.is_active()
    made_entry(logdir / "demo" / "version_0")
    assert plugin.is_active()


def test_without_a_local_folder_the_tab_names_what_it_needs(logdir: Path) -> None:
    for elsewhere in ("", "s3://bucket/logs", str(logdir / "missing")):
        refused = get_from(elsewhere)("runs")
        assert refused.status_code == 400
        assert "--logdir" in refused.text


def test_damaged_folders_are_listed_with_their_error(get: Get, logdir: Path) -> None:
    made_entry(logdir / "good")
    for name, text in {"damaged": '{"schema_version": 1,', "foreign": '{"weights": []}'}.items():
        (logdir / name).mkdir()
        (logdir / name / "run.json").write_text(text)
    answer = get("runs").json
    assert [run["run"] for run in answer["runs"]] == ["good"]
    damaged, foreign = answer["problems"]
    assert "damaged/run.json" in damaged
    assert "foreign/run.json" in foreign
    refused = get("run", run="damaged")
    assert refused.status_code == 400
    assert "damaged/run.json" in refused.text


def test_a_folder_whose_name_is_no_text_is_listed(get: Get, logdir: Path) -> None:
    made_entry(logdir / "good")
    made_entry(Path(os.fsdecode(os.fsencode(logdir) + b"/bad\xff")))
    answer = get("runs")
    assert answer.status_code == 200
    assert [run["run"] for run in json.loads(answer.data)["runs"]] == ["bad\udcff", "good"]
    assert get("run", run="bad\ufffd").status_code == 404  # what a browser makes of the name


def test_two_runs_are_compared_as_the_command_prints_it(get: Get, logdir: Path, capsys: pytest.CaptureFixture[str]):
    """Forward takes 3 ms longer in B: 13 ms of 10. Backward is equal, but of single processes."""
    made_entry(logdir / "a", forward_s=3e-3)
    made_entry(logdir / "b", forward_s=6e-3)
    blocks = get("compare", a="a", b="b").json["blocks"]
    assert "verdict: SLOWER" in text_of(blocks)
    rows = {name: cells for block in blocks_of_kind(blocks, "table") for name, *cells in block["rows"]}
    a_ms, b_ms, difference_ms, *_ = rows["step"]
    assert float(a_ms) == pytest.approx(10.0, abs=0.01)
    assert float(b_ms) == pytest.approx(13.0, abs=0.01)
    assert float(difference_ms) == pytest.approx(3.0, abs=0.01)
    assert rows["forward"][-1] == "SLOWER"
    assert rows["backward"][-1] == "UNCLEAR"
    assert main(["compare", str(logdir / "a"), str(logdir / "b")]) == 0
    printed = capsys.readouterr().out
    intervals = [text for cells in rows.values() for text in cells if "[" in text]
    assert len(intervals) >= 3
    assert [text for text in intervals if text not in printed] == []


def test_a_run_is_not_compared_with_itself(get: Get, logdir: Path) -> None:
    made_entry(logdir / "a")
    assert get("compare", a="a", b="a").status_code == 400


def test_views_without_content_are_named_for_each_run(get: Get, logdir: Path) -> None:
    made_entry(logdir / "a", waterfall=made_waterfall())
    write_trace(made_entry(logdir / "b").folder)
    empty = {run["run"]: set(run["empty_views"]) for run in get("runs").json["runs"]}
    assert empty == {
        "a": {"memory", "ranks", "watch", "kernels", "trace"},
        "b": {"why", "memory", "ranks", "watch", "kernels"},
    }
    assert get("runs").json["empty_views"] == ["improve"]


def test_traces_are_listed_by_rank(get: Get, logdir: Path) -> None:
    run = made_entry(logdir / "a").folder
    assert get("traces", run="a").json["traces"] == []
    of_rank_10 = write_trace(run, "rank10.pt.trace.json.gz", b"rank 10")
    of_rank_2 = write_trace(run, "rank2.pt.trace.json.gz", b"rank 2")
    write_trace(run, ".writing-rank3.pt.trace.json.gz")
    first, second = get("traces", run="a").json["traces"]
    assert (first["file"], first["bytes"]) == ("rank2.pt.trace.json.gz", len(of_rank_2))
    assert (second["file"], second["bytes"]) == ("rank10.pt.trace.json.gz", len(of_rank_10))
    response = get("trace", run="a", file="rank2.pt.trace.json.gz")
    assert response.data == of_rank_2
    assert response.mimetype == "application/gzip"
    assert "Content-Encoding" not in response.headers


def test_the_folders_of_logdir_spec_are_named_as_tensorboard_names_them(logdir: Path) -> None:
    write_trace(made_entry(logdir / "a" / "one" / "version_0").folder)
    made_entry(logdir / "b")
    flags = Namespace(logdir_spec=f"first:{logdir / 'a'},second:{logdir / 'b'}")
    get = get_from("", flags)
    listed = get("runs").json
    assert [run["run"] for run in listed["runs"]] == ["first/one/version_0", "second"]
    assert listed["problems"] == []
    for run in ("first/one/version_0", "second"):
        assert get("run", run=run).status_code == 200
    assert len(get("traces", run="first/one/version_0").json["traces"]) == 1
    for outside in ("first/../b", "third", "first/one", "second/../a/one/version_0"):
        assert get("run", run=outside).status_code == 404


def test_a_folder_of_links_shows_what_they_lead_to_once(logdir: Path) -> None:
    """TensorBoard recommends such a folder to whoever has runs in several places."""
    write_trace(made_entry(logdir / "one" / "version_0").folder)
    made_entry(logdir / "deep" / "er" / "two")
    links = logdir.parent / "links"
    links.mkdir()
    (links / "first").symlink_to(logdir / "one")
    (links / "second").symlink_to(logdir / "deep")
    (links / "again").symlink_to(links)
    (links / "broken").symlink_to(logdir / "missing")
    get = get_from(str(links))
    listed = get("runs").json
    assert ([run["run"] for run in listed["runs"]], listed["problems"]) == (["first/version_0", "second/er/two"], [])
    for run in ("first/version_0", "second/er/two"):
        assert get("run", run=run).status_code == 200
    assert len(get("traces", run="first/version_0").json["traces"]) == 1
    assert get("trace", run="first/version_0", file="rank0.pt.trace.json.gz").status_code == 200
    assert LMProfilerPlugin(TBContext(logdir=str(links))).is_active()
