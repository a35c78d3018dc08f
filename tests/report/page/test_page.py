"""The page that is one file: what it holds, what may run in it, and how large it becomes."""

import base64
import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from made_runs import made_entry, made_rows
from made_waterfall import made_waterfall
from page_reader import Page
from served import get_from
from shown import block_titled, blocks_of_kind, table_rows, text_of
from stored_texts import assert_stored
from whole_record import WHOLE

from lm_profiler.record.entry import Collection, collect
from lm_profiler.record.steps import write_steps
from lm_profiler.report.page.page import write_page
from lm_profiler.report.tables.table import Heading, Table, TableCell
from lm_profiler.report.views.registry import VIEWS

HOSTILE = "</script><script>alert(1)</script><img src=http://evil/x onerror=alert(2)>\"'><!--<script>&lt;"


def nearly(value: Any) -> Any:
    """Equal to six digits."""
    if isinstance(value, dict):
        return {key: nearly(member) for key, member in value.items()}
    if isinstance(value, list):
        return [nearly(member) for member in value]
    return pytest.approx(value, rel=1e-5) if isinstance(value, float) else value


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def page(logs: Path) -> Page:
    entries = [
        made_entry(logs / "a", {"model.size": HOSTILE}, name=HOSTILE, command=f"python {HOSTILE}"),
        made_entry(logs / "b", {"model.size": "small"}, status="oom"),
    ]
    write_page(Collection(entries, [f"{HOSTILE}: damaged"]), logs / "page.html")
    return Page(logs / "page.html")


def test_texts_of_a_run_are_no_markup(page: Page, logs: Path) -> None:
    """Name, size and command of a run try to be a script and an image."""
    tags = {name for name, _ in page.tags}
    attributes = {name for _, attributes in page.tags for name in attributes}
    assert not tags & {"img", "a", "link", "iframe", "object", "base", "form"}
    assert not attributes & {"src", "href", "srcset", "action", "data"}
    assert not [name for name in attributes if name.startswith("on")]
    assert len(page.scripts) == len({route for route, _ in page.answers}) + 2  # plotly, ours
    assert HOSTILE not in page.text
    assert page.answers["runs", None]["problems"] == [f"{HOSTILE}: damaged"]
    [command] = blocks_of_kind(page.answers["run", f"{logs.name}/a"], "command")
    assert command["text"] == f"python {HOSTILE}"


def test_the_policy_of_a_page_allows_its_own_scripts_alone(page: Page) -> None:
    """They are plotly's and ours, the last one."""
    scripts_policy = page.policy.partition("style-src")[0]
    assert page.policy.startswith("default-src 'none'; ")
    assert "http" not in page.policy
    assert "unsafe" not in scripts_policy

    def digest(script: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"

    *data, ours = page.scripts
    plotly = page.plotly.decode()
    assert "plotly.js" in plotly[:200]
    assert digest(plotly) in page.policy
    assert digest(ours) in page.policy
    assert not [script for script in data if digest(script) in page.policy]


def test_the_page_has_the_answers_of_the_tab(tmp_path: Path) -> None:
    folder = made_entry(tmp_path / "logs" / "a", waterfall=made_waterfall()).folder
    made_entry(tmp_path / "logs" / "b", status="oom")
    collection, get = collect([tmp_path / "logs"]), get_from(str(tmp_path / "logs"))
    write_page(collection, tmp_path / "page.html")
    answers = Page(tmp_path / "page.html").answers
    assert folder.name == "a"
    for route in VIEWS:
        for run in ("a", "b"):
            assert answers[route, f"logs/{run}"] == nearly(get(route, run=run).json["blocks"])
    in_tab, in_page = get("runs").json, answers["runs", None]
    for alike in ("columns", "options", "parts", "problems", "colours"):
        assert in_page[alike] == nearly(in_tab[alike])
    for of_page, of_tab in zip(in_page["runs"], in_tab["runs"], strict=True):
        assert of_page == nearly({**of_tab, "run": f"logs/{of_tab['run']}"})


def test_a_table_of_a_page_has_values_to_sort_by(tmp_path: Path) -> None:
    table = Table(
        [Heading("size", "size"), Heading("step_s", "step (ms)", figures=True)],
        [
            [TableCell("small", "small"), TableCell(0.01, "10.00")],
            [TableCell("large", "large"), TableCell(status="oom", text="OOM")],
        ],
        above=["two <b>rows</b>"],
    )
    write_page(Collection([made_entry(tmp_path / "a")]), tmp_path / "page.html", table)
    page = Page(tmp_path / "page.html")
    given = page.answers["runs", None]["given"]
    [long_table] = blocks_of_kind(given, "long table")
    assert long_table["rows"] == [["small", "10.00"], ["large", "OOM"]]
    assert long_table["titles"] == ["size", "step (ms)"]
    assert long_table["values"] == {"1": [0.01, None]}
    assert text_of(given) == "two <b>rows</b>"
    write_page(Collection([], ["x: no run.json"]), tmp_path / "page.html", Table([], []))
    listing = Page(tmp_path / "page.html").answers["runs", None]
    assert listing["runs"] == []
    assert [problem.partition(":")[0] for problem in listing["problems"]] == ["x"]


def jittered(value: Any, by: random.Random) -> Any:
    """Another run's figures: none stands twice."""
    if isinstance(value, dict):
        return {key: member if key == "config" else jittered(member, by) for key, member in value.items()}
    if isinstance(value, list):
        return [jittered(member, by) for member in value]
    return value * by.uniform(0.97, 1.03) if isinstance(value, float) else value


def test_a_page_of_110_runs_takes_at_most_3_5_mb(tmp_path: Path) -> None:
    stored = Path(__file__).parents[2] / "stored" / "0.2" / "tiny" / "version_0"
    table = json.loads((stored / "trace" / "rank0.kernels.json").read_text())
    record = {**WHOLE, "ranks": None, "numerics": None}  # twice the figures of most runs
    by = random.Random(0)
    for number in range(110):
        folder = tmp_path / "logs" / f"run_{number}" / "version_0"
        (folder / "trace").mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps(jittered(record, by)))
        (folder / "trace" / "rank0.kernels.json").write_text(json.dumps(jittered(table, by)))
        write_steps(folder / "steps.csv", made_rows(forward_s=by.uniform(1e-3, 5e-3), steps=100))
    write_page(collect([tmp_path / "logs"]), tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size <= 3_500_000
    answers = Page(tmp_path / "page.html").answers
    for route in VIEWS:
        assert [answered_route for answered_route, _ in answers].count(route) == 110
    name = "logs/run_7/version_0"
    steps = block_titled(answers["run", name], "Time of each step")
    assert "The picture shows every 4th of 100 steps." in text_of([steps])
    charts = blocks_of_kind([steps], "chart")
    assert {len(series["x"]) for chart in charts for series in chart["data"] if series["type"] == "bar"} == {25}
    whys = [text_of(answer) for (route, _), answer in answers.items() if route == "kernels" and len(answer) == 1]
    assert len(whys) == 10
    assert_stored("report/page_left_out", {"kernels": sorted(set(whys))})
    largest = block_titled(answers["kernels", name], "Largest")
    assert len(table_rows(largest)) == 1 + 50
    left_out = len(table["rows"]) - 50 + table["rest"]["rows"]
    assert f"{left_out} smaller rows are not shown" in text_of([largest])
