"""The page holds everything, and nothing in it that a run's name could have put there."""

from __future__ import annotations

import base64
import hashlib
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from made_runs import made_entry

from lm_profiler.record.collection import Collection
from lm_profiler.report.pictures.page import write_page
from lm_profiler.report.tables.groups import shortened
from lm_profiler.report.tables.table import Cell, Heading, Table

HOSTILE = "</script><script>alert(1)</script><img src=http://evil/x onerror=alert(2)>\"'><!--<script>&lt;"


class Page(HTMLParser):
    """What a browser would find: tags with their attributes, scripts, and the text outside them."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        else:
            self.text += data

    @property
    def policy(self) -> str:
        [policy] = [attrs["content"] for _, attrs in self.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
        assert policy is not None
        return policy


@pytest.fixture
def page(tmp_path: Path) -> Page:
    entries = [
        made_entry(tmp_path / "a", {"model.size": HOSTILE}, name=HOSTILE, command=f"python {HOSTILE}"),
        made_entry(tmp_path / "b", {"model.size": "small"}, status="oom"),
    ]
    write_page(Collection(entries, [f"{HOSTILE}: damaged"]), tmp_path / "page.html")
    return Page(tmp_path / "page.html")


def test_nothing_of_a_run_becomes_markup(page: Page) -> None:
    names = {name for name, _ in page.tags}
    assert not names & {"img", "a", "link", "iframe", "object", "base", "form"}
    assert not [attr for _, attrs in page.tags for attr in attrs if attr.startswith("on")]
    assert len(page.scripts) == 3  # the data, plotly, ours
    assert page.text.count(HOSTILE) >= 4  # table, problems, runs and their commands: as text


def test_it_needs_no_network(page: Page) -> None:
    assert not [attrs for _, attrs in page.tags if {"src", "href", "srcset", "action", "data"} & set(attrs)]
    style = page.policy.partition("style-src")[0]
    assert page.policy.startswith("default-src 'none'; ")
    assert "http" not in page.policy
    assert "unsafe" not in style


def test_only_the_scripts_whose_digests_the_policy_names_may_run(page: Page) -> None:
    def digest(script: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"

    [data, *scripts] = page.scripts
    assert [digest(script) in page.policy for script in scripts] == [True, True]
    assert digest(data) not in page.policy
    assert "plotly.js" in scripts[0][:200]


def test_the_charts_have_the_figures(page: Page) -> None:
    data: dict[str, Any] = json.loads(page.scripts[0])
    groups = {group["label"]: group for group in data["phases"]["groups"]}
    assert groups[shortened(HOSTILE)]["parts"] == {"forward": 3.0, "backward": 5.0, "other": 2.0}
    assert groups["small"] == {"label": "small", "trouble": "OOM", "step": None, "parts": {}}
    [line] = data["memory"]["lines"]
    assert sorted(line["absent"]) == ["", "OOM"]
    [known] = [point for point in line["points"] if point is not None]
    assert known == [2.0, None, None]
    [run] = data["runs"]
    assert (run["warmup"], run["cut"], len(run["ms"])) == (5, 0, 25)


def test_each_run_says_its_verdict_its_end_and_its_command(page: Page) -> None:
    for said in (
        "verdict: steady; bound by compute: it computes",
        "next: Try torch.compile.",
        "oom in setup: OutOfMemoryError: no memory left",
        "python -m lm_profiler fit --config a.yaml",
        "2 runs, 1 of them without a good end",
    ):
        assert said in page.text


def test_a_given_table_stands_there_with_values_to_sort_by(tmp_path: Path) -> None:
    table = Table(
        [Heading("size", "size"), Heading("step_s", "step (ms)", figures=True)],
        [[Cell("small", "small"), Cell(0.01, "10.00")], [Cell("large", "large"), Cell(word="oom", text="OOM")]],
        above=["two <b>rows</b>"],
    )
    write_page(Collection([made_entry(tmp_path / "a")]), tmp_path / "page.html", table)
    page = Page(tmp_path / "page.html")
    assert [attrs.get("data-value") for name, attrs in page.tags if name == "td"] == [None, "0.01", None, None]
    assert "two <b>rows</b>" in page.text


def test_a_page_of_problems_alone_can_be_written(tmp_path: Path) -> None:
    write_page(Collection([], ["x: no run.json"]), tmp_path / "page.html", Table([], []))
    assert "x: no run.json" in Page(tmp_path / "page.html").text


def test_the_first_thing_on_the_page_is_figures_and_reasons_are_folded(tmp_path: Path) -> None:
    entries = [made_entry(tmp_path / f"version_{n}", {"data.batch_size": str(n)}, name="demo") for n in (1, 2)]
    entries.append(made_entry(tmp_path / "version_3", {"data.batch_size": "3"}, name="demo", status="oom"))
    write_page(Collection(entries, ["x: no run.json"]), tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    text = page.text
    titles = [part.strip() for part in text[text.index("run\n") if "run\n" in text else 0 :].split("\n")]
    assert titles
    order = [text.index(said) for said in ("step (ms)", "tokens/s", "status", "demo/version_1", "x: no run.json")]
    assert order == sorted(order)
    tags = [name for name, _ in page.tags]
    assert tags.index("table") < tags.index("details")
    assert "demo/version_2" in text  # by name, and by folder where names are alike
    data: dict[str, Any] = json.loads(page.scripts[0])
    assert [run["name"] for run in data["runs"]] == ["demo/version_1", "demo/version_2"]
    assert [group["label"] for group in data["phases"]["groups"]] == ["1", "2", "3"]
    assert data["phases"]["title"] == "batch"
