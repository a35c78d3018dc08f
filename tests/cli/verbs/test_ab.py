"""``ab``: pairs in turns until it is clear; trees of a repository; what is refused."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from compared import busy_entry, rows_of_parts, write_run, written_run_of_10_ms
from raised import refusal
from stored_texts import assert_stored

from lm_profiler.analysis.compare.comparison import decide
from lm_profiler.analysis.compare.ratio import MARGIN, SAME_WITHIN, RatioInterval, change_word
from lm_profiler.cli.main import main
from lm_profiler.cli.verbs import ab
from lm_profiler.improve.decision import pooled_spread, sequential_interval
from lm_profiler.improve.pairs import paired_changes
from lm_profiler.record.entry import Entry
from lm_profiler.record.process_spread import ASSUMED_SPREAD
from lm_profiler.report.run.comparison_table import closing_lines


class Runs:
    """Made-up runs: of B each takes ``ratio`` times as long, and processes differ by ``spread``. Each takes 10 s."""

    def __init__(self, folder: Path, ratio: float, spread: float, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.folder, self.ratio, self.spread = folder, ratio, spread
        self.order, self.now_s = "", 0.0

    def __call__(self, side: str) -> Entry:
        self.order += side
        self.now_s += 10.0
        scale = float(np.exp(self.spread * self.rng.standard_normal())) * (self.ratio if side == "b" else 1.0)
        return written_run_of_10_ms(self.folder / f"{side}_{len(self.order)}", scale)


def test_sides_take_turns_until_the_result_is_clear(tmp_path: Path) -> None:
    runs = Runs(tmp_path, ratio=1.5, spread=0.01)
    pairs = ab.run_in_turns(runs, 600.0, lambda: runs.now_s)
    assert runs.order == "baabbaab"
    interval = pairs.decision().interval
    assert interval.low < 1.5 < interval.high
    assert change_word(interval) == "SLOWER"


@pytest.mark.parametrize("budget_s, pairs", [(1.0, 2), (105.0, 5)])
def test_the_budget_ends_the_comparison(tmp_path: Path, budget_s: float, pairs: int) -> None:
    """Each run takes 10 s; there are two pairs at the least."""
    runs = Runs(tmp_path, ratio=1.02, spread=0.05)
    found = ab.run_in_turns(runs, budget_s, lambda: runs.now_s)
    assert len(found.a) == len(found.b) == pairs
    assert "budget" in found.end_reason
    decision = found.decision(is_final=True)
    assert decision.interval is not None  # of all pairs: the figures beside it are of the same runs
    assert decision.interval.ratio == pytest.approx(decision.b_s / decision.a_s)


def test_what_is_printed_of_an_unclear_comparison_advises_nothing_that_was_done(tmp_path: Path) -> None:
    runs = Runs(tmp_path, ratio=1.02, spread=0.05)
    comparison = ab._compare_pairs(ab.run_in_turns(runs, 105.0, lambda: runs.now_s), MARGIN)
    assert comparison.verdict == "UNCLEAR"
    assert not any("alternate" in line for line in closing_lines(comparison))
    assert comparison.step.of_step == pytest.approx(comparison.step.interval.ratio - 1.0)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.delenv("GIT_DIR", raising=False)
    monkeypatch.chdir(tmp_path)

    def git(*words: str) -> str:
        who = ("-c", "user.email=a@b.c", "-c", "user.name=a")
        return subprocess.run(["git", *who, *words], capture_output=True, text=True, check=True).stdout

    git("init", "-q", "-b", "main", ".")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "program").write_text("old", encoding="utf-8")
    git("add", ".")
    git("commit", "-qm", "one")
    (tmp_path / "inner" / "program").write_text("new", encoding="utf-8")
    return git


def test_the_repository_is_checked_out_elsewhere(
    repository: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path / "inner")
    with ab._tree("a", "git:main") as before, ab._tree("b", ".") as now:
        assert (before / "program").read_text(encoding="utf-8") == "old"
        assert (now / "program").read_text(encoding="utf-8") == "new"
    assert not before.exists()
    assert len(repository("worktree", "list").splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--", "fit"],
        ["--a", "git:nope", "--", "fit"],
        ["--a", "not_there", "--", "fit"],
        ["--a", "git:main", "--budget", "0s", "--", "fit"],
        ["--a", "git:main", "--", "train.py"],
        ["--a", "git:main", "--", "fit", "--name=x"],
        ["--a", "git:main"],
        ["--a", "git:main", "--b_options='", "--", "fit"],
        ["--a", "git:main", "--output", "not/there", "--", "fit"],
        ["--a", "git:main", "--", "fit", "--config", "not_there"],
        ["--a", "git:main", "--", "run", "--", "not_there_at_all"],
    ],
)
def test_refused_in_a_line(words: list[str], repository: Callable[..., str], capsys: pytest.CaptureFixture[str]):
    assert main(["ab", *words]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "uncommitted" not in line]
    assert len(lines) == 1


def test_a_failing_run_ends_it(
    repository: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(call: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(call, 1, "", "first\nno train.py\n")

    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda call, **given: (real if call[0] == "git" else fails)(call, **given))
    assert main(["ab", "--a", "git:main", "--", "run", "--", "python", "train.py"]) == 1
    assert "first; no train.py\n" in capsys.readouterr().err


def test_an_earlier_run_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "logs/a/version_0", rows_of_parts({"forward": [0.01] * 10}))
    left_none = subprocess.CompletedProcess([], 1, "", "no disk\nno run\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: left_none)
    call = ["run", "--", "python", "train.py"]
    message = refusal(ab._RunFailed, lambda: ab._run(call, [], tmp_path, tmp_path / "logs/a"))
    assert_stored("cli/ab", {"no run is left": message}, here=tmp_path)


@pytest.mark.parametrize(
    "ratio, half_width, pairs, pairs_needed",
    [
        (1.03, 0.06, 4, 16),  # the half width, 5.8 %, has to become 3 %
        (1.001, 0.02, 24, 117),  # 24 · (1.980 / 0.900)² = 116.2: it has to become 0.9 %
        (1.02, 0.021, 8, 9),
    ],
)
def test_an_unclear_result_names_the_pairs_needed(
    ratio: float, half_width: float, pairs: int, pairs_needed: int
) -> None:
    interval = RatioInterval(ratio, ratio / (1 + half_width), ratio * (1 + half_width))
    assert ab.pairs_needed(interval, pairs) == pairs_needed


def test_imports_come_from_the_tree(repository: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By PYTHONPATH, by a path file of an editable install, and by the finder of one."""
    seen: dict[str, list[str]] = {}

    def ran(call: list[str], cwd: Path, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        seen["path"] = [os.path.relpath(folder, cwd) for folder in env["PYTHONPATH"].split(os.pathsep)]
        return subprocess.CompletedProcess(call, 1, "", "no\n")

    for name in ("by_path", "src", "found/package"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file.py").write_text("", encoding="utf-8")
    repository("add", ".")
    repository("commit", "-qm", "two")
    (tmp_path / "not_committed").mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["by_path", "/elsewhere"]))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "src"), str(tmp_path / "not_committed"), *sys.path])
    finder = SimpleNamespace(MAPPING={"package": str(tmp_path / "found/package")})
    monkeypatch.setitem(sys.modules, "__editable___package_finder", finder)
    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda call, **given: (real if call[0] == "git" else ran)(call, **given))
    with ab._tree("a", "git:main") as tree, pytest.raises(ab._RunFailed):
        ab._run(["fit"], [], tree, tmp_path / "logs/a")
    assert [folder for folder in seen["path"] if not folder.startswith("..")] == ["by_path", "src", "found"]
    assert os.path.relpath("/elsewhere", tree) in seen["path"]  # what is not the repository's stays where it is


def verdict_of_series(ratio: float, spread: float, seed: int) -> str:
    """Of pairs of processes that differ by ``spread``, looked at after 2, 4, 8, … of them."""
    rng = np.random.default_rng(seed)
    a, b = np.exp(spread * rng.standard_normal((2, ab.AB_LOOKS[-1]))) * [[1.0], [ratio]]
    for look in ab.AB_LOOKS:
        scatter = pooled_spread([a[:look], b[:look]])
        word = change_word(sequential_interval(b[:look] / a[:look], ab.ERROR, scatter, ab.AB_LOOKS))
        if word != "UNCLEAR":
            return word
    return "UNCLEAR"


@pytest.mark.parametrize("spread, slower", [(0.03, 1.05), (0.05, 1.1), (0.1, 1.2)])
def test_equal_trees_are_seldom_called_different(spread: float, slower: float) -> None:
    """Processes differ by 3 to 10 %, as on hosted runners, and 5 % is assumed, in 400 series each."""
    of_equal = [verdict_of_series(1.0, spread, seed) for seed in range(400)]
    assert of_equal.count("FASTER") + of_equal.count("SLOWER") <= 0.05 * 400
    of_slower = [verdict_of_series(slower, spread, seed) for seed in range(400)]
    assert of_slower.count("SLOWER") >= 0.9 * 400


def busy_pairs(rng: np.random.Generator, scale: float, pairs: int) -> tuple[list[Entry], list[Entry]]:
    """Runs on a machine whose cores are all taken: a step of 16 ms waits two to four times as long for its CPU.

    What its neighbours leave of the caches stretches the CPU time of a run by up to 8 %.
    """
    sides: tuple[list[Entry], list[Entry]] = ([], [])
    for number in range(pairs):
        for runs, factor in zip(sides, (1.0, scale), strict=True):
            process = float(np.exp(0.02 * rng.standard_normal()))
            work = 0.016 * factor * process * np.exp(0.02 * rng.standard_normal(10))
            missed, stretch = float(rng.uniform(0.5, 0.75)), 1.0 + 0.08 * float(rng.random())
            runs.append(busy_entry(f"{factor}_{number}", work.tolist(), missed, stretch=stretch))
    return sides


def verdicts_of_busy_pairs(scale: float, tries: int) -> list[str]:
    words = []
    for seed in range(tries):
        a, b = busy_pairs(np.random.default_rng(seed), scale, 12)
        for look in (4, 8, 12):
            word = decide(paired_changes(a[:look], b[:look], ab.ERROR, ASSUMED_SPREAD, ab.AB_LOOKS, MARGIN)).verdict
            if word != "UNCLEAR":
                break
        words.append(word)
    return words


def test_on_a_busy_machine_one_more_layer_is_found():
    """It takes 12 % of a step."""
    assert verdicts_of_busy_pairs(1.12, tries=10).count("SLOWER") >= 8


def test_on_a_busy_machine_equal_programs_are_not_called_different():
    words = verdicts_of_busy_pairs(1.0, tries=10)
    assert words.count("FASTER") + words.count("SLOWER") <= 1


@pytest.mark.parametrize("noise, same_within", [(0.03, SAME_WITHIN), (0.08, 0.1)])
def test_equal_trees_are_the_same_within_a_bound_that_can_be_reached(noise: float, same_within: float) -> None:
    same = 0
    for seed in range(200):
        a, b = np.exp(noise * np.random.default_rng(seed).standard_normal((2, ab.AB_LOOKS[-1])))
        interval = sequential_interval(b / a, ab.ERROR, pooled_spread([a, b]), ab.AB_LOOKS)
        same += change_word(interval, same_within) == "SAME"
    assert same >= 160


@pytest.mark.parametrize(
    "call, words",
    [
        ("run -- python 'my train.py'", ["run", "--", "python", "my train.py"]),
        ('fit --config "$(touch x)"', ["fit", "--config", "$(touch x)"]),
        ("fit `touch x`", ["fit", "`touch", "x`"]),
        ("fit); touch x; (", ["fit);", "touch", "x;", "("]),
        ("fit\n  --config demo\n", ["fit", "--config", "demo"]),
    ],
)
def test_the_github_action_passes_words_unchanged(tmp_path: Path, call: str, words: list[str]) -> None:
    """The step's own script; a package of the same name stands in, and writes its arguments down."""
    action = yaml.safe_load((Path(__file__).parents[3] / "action.yml").read_text(encoding="utf-8"))
    [step] = action["runs"]["steps"]
    assert step["shell"] == "python"
    package = tmp_path / "lm_profiler"
    package.mkdir()
    stand_in = f"import json, sys\njson.dump(sys.argv[1:], open({str(tmp_path / 'given')!r}, 'w'))\nsys.exit(1)\n"
    (package / "__main__.py").write_text(stand_in, encoding="utf-8")
    inputs = {"BASE": "main; rm -rf /", "BUDGET": "5m", "FAIL_ON": "slower", "CALL": call}
    done = subprocess.run([sys.executable, "-c", step["run"]], env={**os.environ, **inputs}, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert json.loads((tmp_path / "given").read_text(encoding="utf-8")) == [
        "ab", "--a", "git:main; rm -rf /", "--b", ".", "--budget", "5m", "--fail_on", "slower", "--", *words
    ]  # fmt: skip
    assert set(inputs) == set(step["env"])
    assert not (tmp_path / "x").exists()
