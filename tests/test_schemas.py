"""The published schemas: files of every version, and of a run today, are held against them by another library."""

import copy
import json
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Thread
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest
from compared import written_run_of_10_ms
from cuda_trace import cuda_step
from jsonschema import Draft202012Validator
from made_improve import made_improve, made_search
from warm import run_python

from lm_profiler.cli.main import TRAINER_VERBS, VERBS, main
from lm_profiler.record.improve_record import read_improve
from lm_profiler.record.run_record import Newer, Part
from lm_profiler.record.sweep_files import read_plan
from lm_profiler.record.watch_files import EVENTS, STATUS, WatchEvent, WatchStatus, append_lines, request_file
from lm_profiler.report.run.improve_table import improve_table
from lm_profiler.report.tables.formats import lines

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs"))  # where the documentation is made from

from schemas import ANSWERS, FORMS, schemas  # noqa: E402  (it stands there)

STORED = ROOT / "tests/stored"
SCHEMAS = {name.partition(".")[0]: schema for name, schema in schemas()}
KINDS = {
    "run.json": "run",
    "rank0.kernels.json": "kernels",
    "sweep.json": "sweep",
    "outcome.json": "outcome",
    "improve.json": "improve",
}
OBJECTS = ("time", "host_time", "memory", "utilisation", "steadiness", "verdict", "throughput")


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.json") if path.name in KINDS)


def against_schema(path: Path, schema: dict[str, Any] | None = None) -> None:
    Draft202012Validator(schema or SCHEMAS[KINDS[path.name]]).validate(json.loads(path.read_text(encoding="utf-8")))


def parts(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The file's object and those within it, by name, that have fields of their own."""
    yield from ((name, part) for name, part in (("", schema), *schema.get("$defs", {}).items()) if "properties" in part)


def exact(kind: str) -> dict[str, Any]:
    """A schema that allows no other field."""
    schema = copy.deepcopy(SCHEMAS[kind])
    for _, part in parts(schema):
        part["additionalProperties"] = False
    return schema


@pytest.mark.parametrize("kind", SCHEMAS)
def test_every_schema_is_valid(kind: str) -> None:
    Draft202012Validator.check_schema(SCHEMAS[kind])


@pytest.mark.parametrize("path", files(STORED), ids=lambda path: path.relative_to(STORED).as_posix())
def test_files_of_every_version_are_valid(path: Path) -> None:
    against_schema(path)


def test_a_run_today_writes_nothing_that_the_schema_does_not_name(tmp_path: Path) -> None:
    call = ("fit", f"--config={STORED / 'tiny.yaml'}", f"--log_dir={tmp_path}", "--name=today", "--numerics.audit=true")
    done = run_python("-m", "lm_profiler", *call, rates=True)
    assert done.returncode == 0, done.stderr
    written = files(tmp_path)
    assert [path.name for path in written] == ["run.json", "rank0.kernels.json"]
    for path in written:
        against_schema(path, exact(KINDS[path.name]))
    record = json.loads(written[0].read_text())
    assert all(record[name] for name in OBJECTS)  # or there would have been little to hold


@pytest.mark.parametrize(
    "change, where",
    [
        ({"duration_s": "long"}, "duration_s"),
        ({"status": "fine"}, "status"),
        ({"schema_version": 2}, "schema_version"),
        ({"memory": {"parts": {}}}, "memory"),
    ],
)
def test_wrong_records_are_not_valid(change: dict[str, Any], where: str) -> None:
    record = json.loads((STORED / "0.2/tiny/version_0/run.json").read_text()) | change
    (error,) = Draft202012Validator(SCHEMAS["run"]).iter_errors(record)
    assert error.absolute_path[0] == where


def test_a_search_of_a_later_version_is_read(tmp_path: Path) -> None:
    record = made_improve()
    made_search(tmp_path, record)
    path = tmp_path / "improve.json"
    against_schema(path, exact("improve"))
    later = json.loads(path.read_text())
    for part in (later, later["final"], *later["tried"]):
        part["added_later"] = 1
    path.write_text(json.dumps(later))
    against_schema(path)
    assert read_improve(tmp_path) == record
    later["ended"], later["tried"][-1]["verdict"] = "postponed", "FASTEST"
    path.write_text(json.dumps(later))
    shown = "\n".join(lines(improve_table(read_improve(tmp_path))))
    assert "postponed" in shown
    assert "FASTEST" in shown


def words(annotation: Any, where: str, known: bool = False) -> Iterator[tuple[str, bool]]:
    """Each place in a type that holds one of some words, and whether a later word may stand there."""
    origin, arguments = get_origin(annotation), get_args(annotation)  # Python 3.10 has tuple[str] for a type
    if origin is Annotated:
        yield from words(arguments[0], where, Newer in arguments[1:])
    elif origin is Literal:
        yield where, known
    elif origin is None and isinstance(annotation, type) and issubclass(annotation, Part):
        for name, inner in get_type_hints(annotation, include_extras=True).items():
            yield from words(inner, f"{annotation.__name__}.{name}") if name in annotation.model_fields else ()
    else:
        for argument in arguments:
            yield from words(argument, where, known)


@pytest.mark.parametrize("kind", FORMS)
def test_later_words_are_valid(kind: str) -> None:
    strict = {where for where, known in words(FORMS[kind], "") if not known}
    assert {where for where in strict if not where.endswith(".schema_version")} == set()


FIGURELESS = {*TRAINER_VERBS, "run"}  # what they print is in the record that they write, or somebody else's
AS_ITS_FILE = {"improve"}  # tests/cli/verbs/test_improve.py: it prints what it writes


def traces_once_asked(folder: Path, kernels: str) -> None:
    """Do what the training in ``folder`` would do."""
    while not request_file(folder, 0).exists():
        time.sleep(0.01)
    (folder / "trace/rank0.step9.kernels.json").write_text(kernels)


COPIES = """
import shutil, sys
from pathlib import Path
given = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[2:])
below = Path(given["log_dir"], given["name"])
shutil.copytree({runs!r}[given["name"]], below / f"version_{{len([*below.glob('version_*')])}}")
"""


def trains_nothing(folder: Path, runs: Mapping[str, Path]) -> None:
    """Have another process that is started in ``folder`` find a package of our name, which copies one of ``runs``."""
    (folder / "lm_profiler").mkdir()
    (folder / "lm_profiler/__init__.py").touch()
    program = COPIES.format(runs={name: str(run) for name, run in runs.items()})
    (folder / "lm_profiler/__main__.py").write_text(program)


def asks_nothing(verb: str, folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    """A call of ``verb`` in ``folder``, in which nothing is trained: what a training would leave is made up."""
    run = str(STORED / "0.2/tiny/version_0")
    if verb == "plan":
        return ["--memory=16GiB", "--allocations"]
    if verb == "selftest":
        trains_nothing(folder, dict.fromkeys("ABCDE", Path(run)))
        patch.setenv("XDG_CACHE_HOME", str(folder))
    if verb in ("watch", "trace"):
        status = WatchStatus(began_s=1.0, written_s=2.0, steps=7, ledger={"step: forward": 1.0}, wall_s=2.0)
        status.write(folder / STATUS)
        append_lines(folder / EVENTS, [WatchEvent(step=4, kind="level", part="data", now=0.2, against=0.1)])
        table = (Path(run) / "trace/rank0.kernels.json").read_text()
        (folder / "trace").mkdir()
        if verb == "trace":
            Thread(target=traces_once_asked, args=(folder, table), daemon=True).start()
        return [str(folder)]
    if verb == "collectives":
        return ["--ops=broadcast", "--sizes=1KB", "--repeats=6"]
    if verb == "sweep":  # every cell of which has ended
        two = shutil.copytree(STORED / "0.2/two", folder / "logs/two")
        words = shlex.split(read_plan(two).command)
        return [f"--config={two / 'configs/tiny.yaml'}", *words[words.index("sweep") + 2 :]]
    if verb == "ab":
        trains_nothing(
            folder, {name: written_run_of_10_ms(folder / name, at).folder for name, at in (("a", 1.0), ("b", 1.2))}
        )
        return ["--b_options=--seed=1", "--", "fit"]
    if verb == "compare":
        return [str(written_run_of_10_ms(folder / name, scale).folder) for name, scale in (("a", 1.0), ("b", 1.2))]
    if verb == "why":
        (folder / "trace.json").write_text(json.dumps(cuda_step()))
        return [str(folder / "trace.json")]
    return [run] if verb == "report" else []


@pytest.mark.usefixtures("formula")
@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in {*FIGURELESS, *AS_ITS_FILE}])
def test_a_verb_that_prints_figures_prints_them_as_json(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    call = [verb, "--format=json", *asks_nothing(verb, tmp_path, monkeypatch)]
    assert main(call) == (1 if verb == "plan" else 0)
    printed = json.loads(capsys.readouterr().out)  # and nothing else is on stdout
    assert printed
    Draft202012Validator(exact(ANSWERS[verb])).validate(printed)


def test_the_page_names_the_schema_of_each_verb() -> None:
    reference = (ROOT / "docs/reference/files.md").read_text("utf-8")
    rows = re.findall(r"^\| (`[^|]+`) \| \[(\w+)\]\(", reference, re.MULTILINE)
    named = {verb: schema for verbs, schema in rows for verb in re.findall(r"`(\w+)`", verbs)}
    assert {verb: named.get(verb) for verb in ANSWERS} == ANSWERS
    assert set(ANSWERS) == set(VERBS) - FIGURELESS
