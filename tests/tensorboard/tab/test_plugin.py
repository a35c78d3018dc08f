"""What the routes answer, of runs made by hand: forward 3 ms, backward 5 ms, other 2 ms (see report/made_runs.py)."""

from __future__ import annotations

import json
import os
import time
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from made_runs import made_entry, made_rows
from served import Get, get_from, write_trace
from tensorboard.plugins.base_plugin import TBContext

from lm_profiler.record.kernels import KernelTable, KindTime, PhaseKernels, Rest
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run_record import OddStep
from lm_profiler.record.steps import write_steps
from lm_profiler.tensorboard.tab.plugin import LMProfilerPlugin


def test_tensorboard_finds_the_plugin_by_itself() -> None:
    [found] = entry_points(group="tensorboard_plugins", name="lm_profiler")
    assert found.load() is LMProfilerPlugin


def test_the_tab_is_there_as_soon_as_a_run_is(logdir: Path) -> None:
    plugin = LMProfilerPlugin(TBContext(logdir=str(logdir)))
    assert not plugin.is_active()
    made_entry(logdir / "demo" / "version_0")
    assert plugin.is_active()


def test_runs_are_listed_with_the_figures_of_their_records(get: Get, logdir: Path) -> None:
    made_entry(logdir / "demo" / "version_0", {"data.batch_size": "8"})
    [run] = get("runs").json["runs"]
    assert run["run"] == "demo/version_0"
    assert run["values"]["status"] == "ok"
    assert run["values"]["step_s"] == pytest.approx(10e-3, rel=0.01)
    assert run["values"]["allocated_peak_bytes"] == 2**31
    low, high = run["intervals"]["backward_s"]
    assert low <= 5e-3 <= high


def test_columns_say_how_their_figures_are_shown(get: Get) -> None:
    columns = {column["name"]: column for column in get("runs").json["columns"]}
    assert columns["step_s"]["shown"] == {"unit": "ms", "scale": 1e3, "digits": 3}
    assert columns["status"]["shown"] is None


def test_a_reload_shows_new_runs_and_new_contents(get: Get, logdir: Path) -> None:
    entry = made_entry(logdir / "a")
    [before] = get("runs").json["runs"]
    time.sleep(0.01)  # the coarsest clock of files that Linux has
    entry.record.model_copy(update={"status": "interrupted"}).write(entry.folder / "run.json")
    made_entry(logdir / "b")
    after, new = get("runs").json["runs"]
    assert (after["run"], after["values"]["status"], new["run"]) == ("a", "interrupted", "b")
    assert after["stamp"] != before["stamp"]


def test_damaged_and_foreign_folders_are_named_with_their_error(get: Get, logdir: Path) -> None:
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


def test_the_list_reads_the_records_of_runs_that_ended_and_not_their_steps(get: Get, logdir: Path) -> None:
    folder = made_entry(logdir / "a").folder
    (folder / "steps.csv").write_text("no steps")
    listed = get("runs").json
    assert ([run["run"] for run in listed["runs"]], listed["problems"]) == (["a"], [])
    assert "a/steps.csv:" in get("run", run="a").text


def test_a_run_shows_its_record_table_and_timed_steps(get: Get, logdir: Path) -> None:
    record = made_entry(logdir / "demo").record
    answer = get("run", run="demo").json
    assert [answer[of] for of in ("status", "command")] == [record.status, record.command]
    titles = [heading["title"] for heading in answer["times"]["headings"]]
    table = dict(zip(titles, zip(*answer["times"]["rows"], strict=True), strict=True))
    assert [*table["phase"]] == ["forward", "backward", "other", "forward + backward", "step"]
    assert [*table["share"][:3]] == ["30.0%", "50.0%", "20.0%"]
    assert [line.partition(":")[0] for line in answer["verdict"]] == ["verdict", "next"]
    steps = answer["steps"]
    assert steps["step"] == list(range(1, 26))
    assert (steps["warmup"], steps["clocks"]) == (5, ["device", "host"])
    assert steps["device"]["backward"] == [5e-3] * 25
    assert steps["host"]["backward"] == [2.5e-3] * 25
    for i in range(25):
        parts = [steps["device"][part][i] for part in PARTS if part in steps["device"]]
        assert sum(parts) == pytest.approx(steps["device"]["step"][i])


def test_odd_steps_are_told_with_their_cause_and_where_they_stand(get: Get, logdir: Path) -> None:
    odd = {"ratio": 1.9, "part": "forward", "excess_s": 9e-3}
    caused = OddStep(step=15, step_s=10.03e-3, cause="page faults", cause_s=8e-3, rank=1, **odd)
    unknown = OddStep(step=9, step_s=10e-3, beside="9.0 ms more asleep", rank=0, **odd)
    made_entry(logdir / "odd", odd_steps=[caused, unknown, OddStep(step=99, step_s=1.0, **odd)], rank_step_s=[1.0, 1.0])
    first, second = get("run", run="odd").json["steps"]["odd"]  # the file has no step 99
    assert (first["step"], first["device"], first["host"]) == (15, pytest.approx(10e-3), pytest.approx(5e-3))
    assert "step 15:" in first["text"]
    assert "rank 1" in first["text"]
    assert "page faults" in first["text"]
    assert "rank 0" in second["text"]


def test_of_many_thousand_steps_some_are_sent(get: Get, logdir: Path) -> None:
    folder = made_entry(logdir / "long").folder
    write_steps(folder / "steps.csv", made_rows(steps=20_000))
    steps = get("run", run="long").json["steps"]
    assert steps["step"] == list(range(1, 20_001, 5))
    assert (steps["of"], steps["every"]) == (20_000, 5)
    assert len(steps["device"]["forward"]) == 4000


def test_a_folder_whose_name_is_no_text_is_listed_and_hides_no_other(get: Get, logdir: Path) -> None:
    made_entry(logdir / "good")
    made_entry(Path(os.fsdecode(os.fsencode(logdir) + b"/bad\xff")))
    answer = get("runs")
    assert answer.status_code == 200
    assert [run["run"] for run in json.loads(answer.data)["runs"]] == ["bad\udcff", "good"]
    assert get("run", run="bad\ufffd").status_code == 404  # what a browser makes of the name


def test_a_run_that_died_before_its_first_step_still_shows(get: Get, logdir: Path) -> None:
    made_entry(logdir / "died", status="oom")
    answer = get("run", run="died").json
    assert answer["times"]["rows"] == []
    assert "OutOfMemoryError:" in answer["error"]
    assert answer["lines"] == []
    assert answer["steps"] == {"step": []}


def test_two_runs_are_compared_as_the_command_does(get: Get, logdir: Path) -> None:
    made_entry(logdir / "a")
    made_entry(logdir / "b", forward_s=6e-3)
    answer = get("compare", a="a", b="b").json
    assert answer["step"]["verdict"] == "SLOWER"
    assert answer["step"]["interval"]["ratio"] == pytest.approx(1.3, rel=0.01)
    assert get("compare", a="a", b="a").status_code == 400


def test_every_part_has_a_colour_of_its_own(get: Get) -> None:
    colours = get("colours").json["parts"]
    assert list(colours) == list(PARTS)
    assert len(set(colours.values())) == len(PARTS)


def test_kernel_tables_come_with_their_ranks(get: Get, logdir: Path) -> None:
    made_entry(logdir / "a")
    assert get("kernels", run="a").json["tables"] == {}
    (logdir / "a" / "trace").mkdir()
    matmul = KindTime(count=4, total_s=0.4)
    table = KernelTable(
        source="operators",
        steps=2,
        window_s=0.5,
        phases={"forward": PhaseKernels(busy_s=0.4, idle_s=0.1, overlap_s=0.0, kinds={"matmul": matmul})},
        rows=[],
        rest=Rest(rows=1, count=4, total_s=0.4),
        memory_bound_share=None,
        communication_share=None,
    )
    for rank in (10, 0, 2):
        table.write(logdir / "a" / "trace" / f"rank{rank}.kernels.json")
    answer = get("kernels", run="a").json["tables"]
    assert list(answer) == ["rank0.kernels.json", "rank2.kernels.json", "rank10.kernels.json"]
    assert answer["rank0.kernels.json"]["step_s"] == 0.25


def test_traces_are_listed_by_rank_and_sent_as_they_lie(get: Get, logdir: Path) -> None:
    run = made_entry(logdir / "a").folder
    assert get("traces", run="a").json["traces"] == []
    sent = {name: write_trace(run, name, name.encode()) for name in map("rank{}.pt.trace.json.gz".format, (10, 2))}
    write_trace(run, ".writing-rank3.pt.trace.json.gz")
    listed = get("traces", run="a").json["traces"]
    assert [(each["file"], each["bytes"]) for each in listed] == [(n, len(sent[n])) for n in reversed(sent)]
    response = get("trace", run="a", file="rank2.pt.trace.json.gz")
    assert response.data == sent["rank2.pt.trace.json.gz"]
    assert response.mimetype == "application/gzip"
    assert "Content-Encoding" not in response.headers


def test_without_one_folder_of_this_machine_it_says_what_it_needs(logdir: Path) -> None:
    for elsewhere in ("", "s3://bucket/logs", str(logdir / "missing")):
        refused = get_from(elsewhere)("runs")
        assert refused.status_code == 400
        assert "--logdir" in refused.text
