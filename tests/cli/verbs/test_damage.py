"""Whatever damage is done to one run's files, it is reported and the other runs are shown, without a traceback."""

import gzip
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_improve import made_improve, made_search
from made_parts import made_kernel, made_kernels, made_phase
from made_runs import made_entry
from stored_texts import assert_stored

from lm_profiler.analysis.evidence import EVIDENCE_FILE, Evidence, write_evidence
from lm_profiler.cli.main import main
from lm_profiler.record.kernels import KernelTable
from lm_profiler.record.run_record import read_run
from lm_profiler.record.steps import read_rows
from lm_profiler.record.watch_files import STATUS, WatchStatus

pytestmark = pytest.mark.usefixtures("no_preflight")


SEED, ROUNDS = 20260102, 5
TABLES = (
    [],
    ["--format", "csv"],
    ["--format", "markdown"],
    ["--format", "json"],
    ["--format", "latex"],
    ["--pivot", "size", "precision"],
    ["--group_by", "size"],
    ["--columns", "name,size,parameters,step_s,allocated_peak_bytes,model.size,status"],
    ["--layout", "wide"],
    ["--layout", "devices"],
    ["--layout", "blocks"],
    ["--layout", "warmups"],
    ["--warmup", "0", "2"],
    ["--kernels"],
    ["--kernels", "--format", "csv"],
)
PICTURES = ("phases", "memory", "mfu", "html")
EVIL = "\x1b]0;evil\x07\x9b31m\u202e"
VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 2.5, 1e30, -1e30, 2**63, -0.0, 5e-324, None, True, "", "x", EVIL, "0"),
    *([], {}, [1, 2], ["a"], {"a": 1}, [[]], "=1+1", "a|b", "a\rb", "\udcff".encode("utf-8", "replace").decode()),
)


def kernels() -> KernelTable:
    row = made_kernel("mm", 8, 0.6, operator="aten::mm", module="a", module_type="Attention")
    return made_kernels([row], {"forward": made_phase(0.6, 0.4, matmul=(8, 0.6))}, 1.0)


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Three runs: one to be damaged, between two that stay whole."""
    for name in ("first", "middle", "second"):
        folder = tmp_path / "logs" / name
        made_entry(folder, {"model.size": "small", "trainer.precision": "32-true"}, name=name)
        (folder / "trace").mkdir()
        kernels().write(folder / "trace" / "rank0.kernels.json")
    return tmp_path / "logs"


def flipped(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]


def cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def leaves(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value within ``value``, containers included."""
    for key, below in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*way, key)
        yield from leaves(below, (*way, key))


def replaced(content: bytes, rng: random.Random) -> bytes:
    """Another value somewhere: in JSON anywhere, in a table in any field."""
    if not content.startswith(b"{"):
        rows = [line.split(",") for line in content.decode().splitlines()]
        row = rng.choice(rows)
        row[rng.randrange(len(row))] = str(rng.choice(VALUES))
        return "\n".join(map(",".join, rows)).encode("utf-8", "replace")
    found = json.loads(content)
    every = list(leaves(found))
    first = rng.choice([*sorted({way[0] for way in every}), *["config"] * 10])  # the configuration as often as the rest
    *way, last = rng.choice([way for way in every if way[0] == first] or every)
    at = found
    for key in way:
        at = at[key]
    if rng.random() < 0.2 and isinstance(at, dict):
        del at[last]
    else:
        at[last] = rng.choice(VALUES)
    return json.dumps(found).encode()


DAMAGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (flipped, cut, replaced, replaced)


def damage(logs: Path, rng: random.Random) -> str:
    """Damage one file of the middle run; what was done, for the message of a test that fails."""
    path = logs / "middle" / rng.choice(["run.json", "run.json", "steps.csv", "trace/rank0.kernels.json"])
    before, how = path.read_bytes(), rng.choice(DAMAGES)
    path.write_bytes(after := how(before, rng))
    differ = next((at for at, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
    return f"{how.__name__} {path.name} at {differ}: {after[max(0, differ - 60) : differ + 60]!r}"


def shown(logs: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    code = main(["report", str(logs), *options])
    out, err = capsys.readouterr()
    assert code in (0, 2), err
    assert "csv" in options or not any(c in out + err for c in "\x1b\x07\x9b\u202e")
    return out


@pytest.mark.parametrize("round_", range(ROUNDS))
def test_a_damaged_run_hides_no_other(logs: Path, round_: int, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(SEED + round_)
    whole = {path: path.read_bytes() for path in (logs / "middle").rglob("*") if path.is_file()}
    for options in TABLES:
        what = damage(logs, rng)
        try:
            out = shown(logs, options, capsys)
        except Exception as error:
            raise AssertionError(f"{options} after {what}") from error
        by_fact = {"--pivot", "--group_by", "devices", "wide"} & set(options)
        missing = [name for name in ("first", "second") if name not in out and not by_fact]
        missing += ["one of the others"] * ("wide" in options and out.count("2.17643e-05") < 4)
        assert not missing, f"{missing} after {what}: {out}"
        for path, content in whole.items():
            path.write_bytes(content)


@pytest.mark.parametrize("kind", PICTURES)
def test_a_damaged_run_is_no_picture_less(logs: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]):
    what = damage(logs, random.Random(SEED + PICTURES.index(kind)))
    output = tmp_path / ("a.html" if kind == "html" else "a.svg")
    shown(logs, ["--output", str(output), *(["--plot", kind] if kind != "html" else [])], capsys)
    assert output.stat().st_size > 1000, what


def test_a_damaged_search_hides_no_run(logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_search(logs / "search", made_improve())
    path = logs / "search" / "improve.json"
    whole = path.read_bytes()
    for round_ in range(24):
        rng = random.Random(SEED + round_)
        path.write_bytes(rng.choice(DAMAGES)(whole, rng))
        for options in (
            [],
            ["--output", str(tmp_path / "page.html")] if round_ % 12 == 0 else ["--format", "markdown"],
        ):
            out = shown(logs, options, capsys)
            assert options or all(name in out for name in ("first", "second")), path.read_text()


def same_kind(value: Any) -> list[Any]:
    """The odd values of the type of ``value``: others are refused before anybody reckons with them."""
    kind = (int, float) if isinstance(value, int | float) else type(value)
    return [odd for odd in VALUES if isinstance(odd, kind)] or [*VALUES]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of sums beyond what a float holds
@pytest.mark.parametrize("name, options, rounds", [(EVIDENCE_FILE, ["--again"], 40), (STATUS, [], 80)])
def test_odd_evidence_is_shown_or_reported(logs: Path, name: str, options: list[str], rounds: int):
    folder = logs / "middle"
    record = read_run(folder)
    shared = {field: getattr(record, field) for field in Evidence.__dataclass_fields__ if hasattr(record, field)}
    write_evidence(folder, Evidence(**{**shared, "rows": read_rows(folder)}))
    ledger = {"step: forward": 5.0, "validation": 2.0}
    status = WatchStatus(began_s=1e9, written_s=1e9 + 10, steps=40, ledger=ledger, wall_s=10.0, silent={1: 1e9})
    status.write(folder / STATUS)
    pack, unpack = (gzip.compress, gzip.decompress) if name.endswith(".gz") else (bytes, bytes)
    whole = json.loads(unpack((folder / name).read_bytes()))
    for round_ in range(rounds):
        rng = random.Random(SEED + round_)
        found = json.loads(json.dumps(whole))
        *way, last = rng.choice(list(leaves(found)))
        at = found
        for key in way:
            at = at[key]
        at[last] = rng.choice(same_kind(at[last]))
        (folder / name).write_bytes(pack(json.dumps(found).encode()))
        assert main(["report", str(folder), *options]) in (0, 1, 2), (way, last, at[last])


@pytest.mark.parametrize(
    "way, value",
    [
        (("config", "model", "size"), ["a list"]),
        (("config", "model", "size"), {}),
        (("config", "data", "batch_size"), 10**400),
        (("steps", "measure"), 0),
    ],
)
def test_values_that_ended_a_report(logs: Path, way: tuple[str, ...], value: Any, capsys: pytest.CaptureFixture[str]):
    path = logs / "middle" / "run.json"
    found = at = json.loads(path.read_bytes())
    for key in way[:-1]:
        at = at[key]
    at[way[-1]] = value
    path.write_text(json.dumps(found))
    for options in TABLES:
        assert main(["report", str(logs), *options]) == 0
        assert "Traceback" not in capsys.readouterr().err


def test_damaged_counts_and_lines_are_reported(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = logs / "middle" / "trace" / "rank0.kernels.json"
    path.write_text(path.read_text().replace('"steps": 2', '"steps": 0'))
    assert main(["report", str(logs), "--kernels"]) == 0
    assert_stored("record/problems: kernels of no steps", {"stderr": capsys.readouterr().err}, logs=logs)
    path = logs / "middle" / "steps.csv"
    lines = path.read_text().splitlines()
    lines[3] = lines[3].replace("0.", "\x1b.", 1)
    path.write_text("\n".join(lines))
    assert main(["report", str(logs), "--warmup", "0"]) == 0
    assert_stored("record/problems: damaged line", {"stderr": capsys.readouterr().err}, logs=logs)


@pytest.mark.parametrize(
    "whole, damaged",
    [('"forward": {', '"fosward": {'), ('"busy_s": 0.6,\n   "idle_s": 0.4', '"busy_s": 0,\n   "idle_s": 0')],
)
def test_kernels_without_phase_time_are_named(logs: Path, whole: str, damaged: str, capsys: pytest.CaptureFixture[str]):
    path = logs / "middle" / "trace" / "rank0.kernels.json"
    assert whole in path.read_text()
    path.write_text(path.read_text().replace(whole, damaged))
    assert main(["report", str(logs), "--kernels"]) == 0
    out, err = capsys.readouterr()
    assert "second" in out
    assert_stored("record/problems: kernels of no time", {"stderr": err}, logs=logs)


def test_no_escape_reaches_a_terminal(logs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    path = logs / "middle" / "run.json"
    found = json.loads(path.read_bytes())
    found |= {"name": EVIL, "status": "failed", "notes": [EVIL]}
    found["failure"] = {"phase": EVIL, "step": 1, "type": EVIL, "message": EVIL}
    path.write_text(json.dumps(found))
    for top, *options in ((logs, *t) for t in TABLES if "--kernels" not in t):
        with monkeypatch.context() as patch:
            if "csv" in options:
                patch.setattr("sys.stdout.isatty", lambda: True, raising=False)
            assert main(["report", str(top), *options]) == 0
        out, err = capsys.readouterr()
        assert not any(c in out + err for c in "\x1b\x07\x9b\u202e"), options
    assert main(["report", str(logs / "middle")]) == 0
    assert "\\x1b]0;evil\\x07\\x9b31m\\u202e" in (out := capsys.readouterr().out)
    assert not any(c in out for c in "\x1b\x07\x9b\u202e")
