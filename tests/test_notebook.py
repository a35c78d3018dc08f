"""What ``import lm_profiler`` offers shows itself; the page about notebooks is true, cell by cell."""

import copy
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

import lm_profiler
from lm_profiler.notebook import Shown
from lm_profiler.record.run_record import read_run
from lm_profiler.report.tables.table import Heading, Table, TableCell
from lm_profiler.usage_error import UsageError

ROOT = Path(__file__).parents[1]
STORED = ROOT / "tests/stored/0.2"
PAGE = ROOT / "docs/how-to/notebook.md"


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "changed"):
        shutil.copytree(STORED / "tiny/version_0", tmp_path / "logs" / name / "version_0")
    return tmp_path / "logs"


class Checked(HTMLParser):
    """The tags of some HTML, each of which is closed in its turn, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.open, self.text = set[str](), list[str](), ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.open.append(tag)
        assert {name for name, _ in attrs} <= {"style"}  # nothing to load, nothing to run

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def cells() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)


# in the kernel: the rehearsal of a plan takes half a minute, and has tests of its own
REHEARSED = """
from lm_profiler.analysis.plan.planned import Planned
from lm_profiler.cli.verbs import plan
planned = Planned({"forward": 1 << 30, "backward": 2 << 30}, {}, 8, 128, 64)
plan._rehearse_each = lambda *asked: iter([planned] * len(asked[-1]))
"""


def test_a_table_takes_a_layout_and_conditions(logs: Path) -> None:
    wide = lm_profiler.table(logs, layout="wide", where=["verb=fit"])
    assert len(wide.rows) == 2
    assert "fwd avg (sec)" in repr(wide)
    for wrong in ({"layout": "wyde"}, {"layout": "wide", "columns": ["name"]}, {"where": ["verb=test"]}):
        with pytest.raises(UsageError):
            lm_profiler.table(logs, **wrong)
    steps = lm_profiler.load(logs / "demo").steps
    assert np.array_equal(steps["forward_backward_s"], steps["forward_s"] + steps["backward_s"])
    assert np.array_equal(steps["forward_backward_host_s"], steps["forward_host_s"] + steps["backward_host_s"])


def test_the_cells_of_the_page_show_what_they_name(logs: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in [REHEARSED, *cells()]])
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": "."}}).execute()
    shown = [output["data"] for cell in notebook.cells for output in cell.outputs if "data" in output]
    run, figures, steps, table, compared, verdict, plan = shown
    record = read_run(logs / "demo/version_0")
    assert eval(figures["text/plain"]) == (record.time["step"].mean, record.throughput.tokens_per_s, "ok")
    assert eval(steps["text/plain"])[0] == pytest.approx(record.time["step"].mean)
    assert verdict["text/plain"] in ("'SAME'", "'UNCLEAR'")
    for what, words in (
        (run, "backward"),
        (table, "tokens/s"),
        (compared, "verdict: "),
        (plan, "the largest batch or context that fits"),
    ):
        html = Checked(what["text/html"])
        assert words in html.text
        assert words in what["text/plain"]
        assert html.tags == {"pre"}


def test_the_latest_run_is_loaded_with_its_figures_as_attributes(logs: Path) -> None:
    later = shutil.copytree(logs / "demo/version_0", logs / "demo/version_1")
    run = lm_profiler.load(logs / "demo")
    assert run.folder == later
    assert {"step_s", "mfu", "status", "steps", "folder"} <= {*dir(run)}
    assert run.mfu is None
    assert len(run.steps) == len(run.steps["step_s"]) == sum(run.data.steps.values())
    assert np.all(run.steps["stage"][:2] == "warmup")
    assert copy.copy(run).folder == later
    with pytest.raises(AttributeError):
        _ = run.nothing
    with pytest.raises(KeyError):
        run.steps["nothing"]


def test_pandas_is_used_where_it_is(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = lm_profiler.load(logs).steps
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=dict))
    assert list(steps.to_pandas()) == [*steps.columns, *steps.sums]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pandas"):
        steps.to_pandas()


def test_a_folder_without_a_run_is_one_line(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(UsageError, match="load: expected"):
            lm_profiler.load(folder)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UsageError, match=r"load: .*run\.json"):
        lm_profiler.load(tmp_path)


def test_text_of_others_stays_text() -> None:
    nasty = "<script>alert(1)</script>\x1b[31m & \u202e"
    table = Table([Heading("a", nasty)], [[TableCell(text=nasty, style="red")]], [nasty], [nasty], title=nasty)
    html = Shown(None, [table])._repr_html_()
    assert "<script" not in html
    assert "\x1b" not in html
    assert Checked(html).text.count("<script>alert(1)</script>") == 5
