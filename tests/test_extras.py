"""What a plain ``pip install lm_profiler`` can do, and the error of a call that needs more."""

import json
import sys
from pathlib import Path

import pytest
import warm
from raised import refusal
from stored_texts import assert_stored

from lm_profiler.record.calls import EXTRA_OF, MissingExtra, require

PLAIN_MODULE = Path(__file__).resolve().parent.parent / "examples" / "plain_module.py"

WITHOUT = f"""
import contextlib, io, runpy, shutil, sys
from imported_anew import forget_our_modules
forget_our_modules()
sys.modules |= dict.fromkeys({[*EXTRA_OF, "scipy"]})  # None there: they cannot be imported, nor found
runpy.run_path({str(PLAIN_MODULE)!r}, run_name="__main__")
from lm_profiler.cli.main import main
run, *repeats = (f"logs/plain_module/version_{{n}}" for n in range(4))
for repeat in repeats:
    shutil.copytree(run, repeat)
for call in [
    ["report", "logs"],
    ["report", run, "--kernels", "--format", "csv"],
    ["compare", run, repeats[0]],
    ["report", "logs", "--output", "runs.html"],
    ["report", "logs", "--output", "runs.parquet"],
    ["report", "logs", "--plot", "phases", "--output", "phases.svg"],
    ["compare", "--a", run, repeats[0], "--b", *repeats[1:]],
]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as output:
        code = main(call)
    print("CALL", code, output.getvalue().strip())
"""


def test_without_extras_training_is_profiled(tmp_path: Path) -> None:
    done = warm.run_python("-c", WITHOUT, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "logs" / "plain_module" / "version_0"
    assert json.loads((folder / "run.json").read_text(encoding="utf-8"))["status"] == "ok"
    assert list(folder.glob("events.out.tfevents.*"))
    assert "forward + backward" in done.stdout
    answers = [line.split(" ", 2)[1:] for line in done.stdout.splitlines() if line.startswith("CALL")]
    assert [int(code) for code, _ in answers] == [0, 0, 0, 2, 2, 2, 0], answers
    assert_stored("record/refused: without extras", {"three calls": [text for code, text in answers if code != "0"]})
    assert not list(tmp_path.glob("*.*")), "nothing is written by halves"


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    require("matplotlib", "plot")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = refusal(MissingExtra, lambda: require("matplotlib", "plot"))
    assert_stored("record/refused: without an extra", {"plot": message})
