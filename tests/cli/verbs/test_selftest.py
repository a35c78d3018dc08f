"""What the self-test prints, from records made by hand; and once for real."""

import json
import math
import os
import re
from pathlib import Path

import pytest
import warm
from made_environment import made_contention, made_environment, made_run
from scipy import stats
from stored_texts import assert_stored

from lm_profiler.cli.main import main
from lm_profiler.cli.verbs import selftest
from lm_profiler.record.process_spread import ProcessSpread
from lm_profiler.record.quantities import TIMES
from lm_profiler.record.run_record import RunRecord, Steadiness, TimeSummary

pytestmark = pytest.mark.usefixtures("no_rates", "no_preflight")


def cell_record(mean_ms: float, word: str | None = "steady") -> RunRecord:
    """A run whose summary of the step is filled in by hand."""
    step = {"n": 16, "mean": mean_ms * 1e-3, "mean_low": mean_ms * 0.99e-3, "mean_high": mean_ms * 1.02e-3}
    return made_run(
        name="x",
        environment=made_environment(device_name="Toy CPU"),
        time={part: TimeSummary(**({"n": 0} if part != "step" else step)) for part in TIMES},
        steadiness=Steadiness(word=word, cut=0, lag1=None, bias_of_mean=None),
    )  # fmt: skip


SEEN = ProcessSpread(std=0.01, freedom=4)


def report_of(kept: ProcessSpread | None = SEEN) -> list[str]:
    runs = [cell_record(10.0), cell_record(20.0, None), *[cell_record(10.0)] * 3]
    return selftest.report_lines(selftest.conclude_test(runs, kept and SEEN, kept))


def test_printed_self_tests() -> None:
    texts = {
        "five runs": report_of(),
        "with earlier self-tests": report_of(kept=ProcessSpread(std=0.02, freedom=8)),
        "too few steps": report_of(kept=None),
    }
    assert_stored("cli/selftest", texts)


def test_a_shared_machine_and_the_spread_of_processes_are_reported() -> None:
    shared = cell_record(10.0).model_copy(update={"contention": made_contention(0.41)})
    texts = selftest.report_lines(selftest.conclude_test([shared, cell_record(10.0)], SEEN, SEEN))
    assert ", steady, shared; " in texts[1]
    assert "41%" in texts[1]
    assert texts[2].endswith(", steady")
    texts = "\n".join(report_of(kept=ProcessSpread(std=0.02, freedom=8)))
    root = math.sqrt(2.0) * 0.02
    single_change = math.expm1(root * (stats.t.ppf(0.985, 8) + stats.norm.ppf(0.8)))
    three = math.expm1(root / math.sqrt(3.0) * (stats.t.ppf(0.985, 4) + stats.norm.ppf(0.8)))
    (line,) = [line for line in texts.splitlines() if "smallest change" in line]
    assert re.findall(r"[\d.]+%", line) == [f"{single_change:.1%}", f"{three:.1%}"]


def test_a_wrong_call_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    finished = warm.run_python("-m", "lm_profiler", "selftest", "--stages.warmup=3", folder=tmp_path)
    assert finished.returncode == 2
    assert "--stages.warmup_steps" in finished.stderr
    assert len(finished.stderr.splitlines()) == 1
    assert finished.stdout == ""
    assert main(["selftest", "--config=nowhere.yaml"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("lm_profiler: config:")
    assert "nowhere.yaml" in line


def test_a_real_self_test(tmp_path: Path) -> None:
    tiny = (
        "--model.d_model=32", "--model.d_ff=64", "--model.num_layers=1", "--model.num_heads=2",
        "--model.vocab_size=64", "--data.context_length=16", "--data.batch_size=2", "--trainer.accelerator=cpu",
        "--stages.warmup_steps=1", "--stages.measure_steps=24",  # half may be left out
    )  # fmt: skip
    (tmp_path / "runs").mkdir()
    cache = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = warm.run_python("-m", "lm_profiler", "selftest", *tiny, folder=tmp_path / "runs", environment=cache)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    first = [line.split()[0] for line in printed]
    assert first == ["equal", "A:", "B:", "C:", "D:", "E:", "processes", "smallest"]
    assert not list((tmp_path / "runs").iterdir())  # it keeps no runs
    kept = list((tmp_path / "cache" / "lm_profiler").glob("processes-*.json"))
    is_busy = "not kept" in done.stdout  # the machine of the test
    assert [json.loads(file.read_text())["freedom"] for file in kept] == ([] if is_busy else [4])


@pytest.mark.parametrize("missed, files", [(0.0, 1), (0.41, 0)])
def test_a_busy_machine_is_not_kept(missed: float, files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise later comparisons on the quiet machine would take its load for granted."""
    contention = made_contention(missed)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(selftest, "_fit", lambda *_: cell_record(10.0).model_copy(update={"contention": contention}))
    assert selftest.run(selftest.Options()) == 0
    assert len(list((tmp_path / "lm_profiler").glob("processes-*.json"))) == files
