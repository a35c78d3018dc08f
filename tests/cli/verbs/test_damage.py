"""Whatever damage is done to one run's files, it is reported and the other runs are shown, without a traceback."""

import gzip
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_improve import made_improve, made_search
from made_parts import made_kernel, made_kernels, made_phase
from made_runs import made_entry
from stored_texts import assert_stored

from lm_profiler.analysis.evidence import EVIDENCE_FILE, Evidence, write_evidence
from lm_profiler.cli.main import main
from lm_profiler.record.run_record import read_run
from lm_profiler.record.steps import read_rows
from lm_profiler.record.watch_files import STATUS, WatchStatus

SEED = 20260102
TABLE_OPTIONS = (
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
CONTROL_CHARACTERS = "\x1b\x07\x9b\u202e"
EVIL = "\x1b]0;evil\x07\x9b31m\u202e"  # sets the title of a terminal, its colour, and the direction of its text
ODD_VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 2.5, 1e30, -1e30, 2**63, -0.0, 5e-324, None, True, "", "x", EVIL, "0"),
    *([], {}, [1, 2], ["a"], {"a": 1}, [[]], "=1+1", "a|b", "a\rb", "\ufffd"),
)


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Three runs: ``middle`` is to be damaged, ``first`` and ``second`` stay whole."""
    product = made_kernel("mm", 8, 0.6, operator="aten::mm", module="a", module_type="Attention")
    kernels = made_kernels([product], {"forward": made_phase(0.6, 0.4, matmul=(8, 0.6))}, 1.0)
    for name in ("first", "middle", "second"):
        folder = tmp_path / "logs" / name
        made_entry(folder, {"model.size": "small", "trainer.precision": "32-true"}, name=name)
        (folder / "trace").mkdir()
        kernels.write(folder / "trace" / "rank0.kernels.json")
    return tmp_path / "logs"


def with_another_bit(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content))
    changed_byte = content[place] ^ 1 << draw.randrange(8)
    return content[:place] + bytes([changed_byte]) + content[place + 1 :]


def cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content))]


Keys = tuple[Any, ...]  # that lead from the outermost container of JSON to a value


def keys_of_values(value: Any, keys: Keys = ()) -> Iterator[Keys]:
    """Yield the keys that lead to each value within ``value``, containers included."""
    items: Iterable[Any] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, inner_value in items:
        yield (*keys, key)
        yield from keys_of_values(inner_value, (*keys, key))


def container_of(content: Any, keys: Keys) -> Any:
    """Return the list or dictionary that holds the value to which ``keys`` lead."""
    for key in keys[:-1]:
        content = content[key]
    return content


def with_another_value(content: bytes, draw: random.Random) -> bytes:
    """Replace or remove a value of JSON, or a field of a table."""
    if not content.startswith(b"{"):
        rows = [line.split(",") for line in content.decode().splitlines()]
        row = draw.choice(rows)
        row[draw.randrange(len(row))] = str(draw.choice(ODD_VALUES))
        return "\n".join(map(",".join, rows)).encode()
    record = json.loads(content)
    all_keys = list(keys_of_values(record))
    if "config" in record and draw.random() < 0.5:  # users write it, and its values are shown in many ways
        all_keys = [keys for keys in all_keys if keys[0] == "config"]
    keys = draw.choice(all_keys)
    container = container_of(record, keys)
    if isinstance(container, dict) and draw.random() < 0.2:
        del container[keys[-1]]
    else:
        container[keys[-1]] = draw.choice(ODD_VALUES)
    return json.dumps(record).encode()


def damaged(content: bytes, draw: random.Random) -> bytes:
    damage = draw.choice((with_another_bit, cut, with_another_value, with_another_value))
    return damage(content, draw)


def damage_middle_run(logs: Path, draw: random.Random) -> str:
    """Damage a file of the run; return its name and content, for the message of a test that fails."""
    name = draw.choice(["run.json", "run.json", "steps.csv", "trace/rank0.kernels.json"])
    path = logs / "middle" / name
    content = damaged(path.read_bytes(), draw)
    path.write_bytes(content)
    return f"{name}: {content!r}"


def printed_report(logs: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    code = main(["report", str(logs), *options])
    out, err = capsys.readouterr()
    assert code in (0, 2), err
    if "csv" not in options:
        assert not set(CONTROL_CHARACTERS) & set(out + err)
    return out


@pytest.mark.parametrize("seed", range(SEED, SEED + 5))
def test_a_damaged_run_hides_no_other(logs: Path, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a table shows no names, its step time of 2.17643e-05 s appears twice per run."""
    draw = random.Random(seed)
    whole = {path: path.read_bytes() for path in (logs / "middle").rglob("*") if path.is_file()}
    for options in TABLE_OPTIONS:
        damage = damage_middle_run(logs, draw)
        try:
            out = printed_report(logs, options, capsys)
        except Exception as error:
            raise AssertionError(f"{options} after {damage}") from error
        if "wide" in options:
            assert out.count("2.17643e-05") >= 2 * 2, damage
        elif not {"--pivot", "--group_by", "devices"} & set(options):
            assert "first" in out, damage
            assert "second" in out, damage
        for path, content in whole.items():
            path.write_bytes(content)


@pytest.mark.parametrize("kind", ["phases", "memory", "mfu", "html"])
def test_a_damaged_run_is_no_picture_less(logs: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]):
    damage = damage_middle_run(logs, random.Random(f"{SEED} {kind}"))
    output = tmp_path / ("a.html" if kind == "html" else "a.svg")
    plot = [] if kind == "html" else ["--plot", kind]
    printed_report(logs, ["--output", str(output), *plot], capsys)
    assert output.stat().st_size > 1000, damage


def test_a_damaged_search_hides_no_run(logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_search(logs / "search", made_improve())
    path = logs / "search" / "improve.json"
    whole = path.read_bytes()
    for number in range(24):
        path.write_bytes(damaged(whole, random.Random(SEED + number)))
        out = printed_report(logs, [], capsys)
        assert "first" in out, path.read_bytes()
        assert "second" in out, path.read_bytes()
        if number % 12 == 0:
            printed_report(logs, ["--output", str(tmp_path / "page.html")], capsys)
        else:
            printed_report(logs, ["--format", "markdown"], capsys)


def odd_values_like(value: Any) -> list[Any]:
    """Values of the type of ``value``: those of other types are refused before they are used."""
    kind = (int, float) if isinstance(value, int | float) else type(value)
    return [odd for odd in ODD_VALUES if isinstance(odd, kind)] or [*ODD_VALUES]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of sums beyond what a float holds
@pytest.mark.parametrize("name, options, rounds", [(EVIDENCE_FILE, ["--again"], 40), (STATUS, [], 80)])
def test_odd_evidence_is_shown_or_reported(logs: Path, name: str, options: list[str], rounds: int) -> None:
    folder = logs / "middle"
    record = read_run(folder)
    shared = {field: getattr(record, field) for field in Evidence.__dataclass_fields__ if hasattr(record, field)}
    write_evidence(folder, Evidence(**{**shared, "rows": read_rows(folder)}))
    ledger = {"step: forward": 5.0, "validation": 2.0}
    status = WatchStatus(began_s=1e9, written_s=1e9 + 10, steps=40, ledger=ledger, wall_s=10.0, silent={1: 1e9})
    status.write(folder / STATUS)
    pack, unpack = (gzip.compress, gzip.decompress) if name.endswith(".gz") else (bytes, bytes)
    whole = unpack((folder / name).read_bytes())
    for number in range(rounds):
        draw = random.Random(SEED + number)
        content = json.loads(whole)
        keys = draw.choice(list(keys_of_values(content)))
        container = container_of(content, keys)
        container[keys[-1]] = draw.choice(odd_values_like(container[keys[-1]]))
        (folder / name).write_bytes(pack(json.dumps(content).encode()))
        assert main(["report", str(folder), *options]) in (0, 1, 2), (keys, container[keys[-1]])


@pytest.mark.parametrize(
    "keys, value",
    [
        (("config", "model", "size"), ["a list"]),
        (("config", "model", "size"), {}),
        (("config", "data", "batch_size"), 10**400),
        (("steps", "measure"), 0),
    ],
)
def test_values_that_ended_a_report(logs: Path, keys: Keys, value: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = logs / "middle" / "run.json"
    record = json.loads(path.read_bytes())
    container_of(record, keys)[keys[-1]] = value
    path.write_text(json.dumps(record))
    for options in TABLE_OPTIONS:
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
    record = json.loads(path.read_bytes())
    record |= {"name": EVIL, "status": "failed", "notes": [EVIL]}
    record["failure"] = {"phase": EVIL, "step": 1, "type": EVIL, "message": EVIL}
    path.write_text(json.dumps(record))
    calls = [[str(logs), *options] for options in TABLE_OPTIONS if "--kernels" not in options]
    for call in [*calls, [str(path.parent)]]:
        with monkeypatch.context() as patch:
            if "csv" in call:  # to a file, it has the texts as they are
                patch.setattr("sys.stdout.isatty", lambda: True, raising=False)
            assert main(["report", *call]) == 0
        out, err = capsys.readouterr()
        assert not set(CONTROL_CHARACTERS) & set(out + err), call
    assert "\\x1b]0;evil\\x07\\x9b31m\\u202e" in out
