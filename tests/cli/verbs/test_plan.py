"""The verb ``plan``, with the rehearsal's part played by a formula."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from made_plan import Formula
from raised import refusal
from stored_texts import assert_stored

from lm_profiler.analysis.plan.planned import smallest_gpu
from lm_profiler.cli.rehearse import Unplanned
from lm_profiler.cli.verbs import plan
from lm_profiler.models.config import preset
from lm_profiler.usage_error import UsageError


def test_a_run_that_does_not_fit_has_rehearsed_remedies(formula: Formula, capsys: pytest.CaptureFixture[str]):
    assert plan.run(plan.Options(device="A30", options=["--data.batch_size=8"])) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any("42.0 GiB" in line and "46.7 GiB" in line and "23.5 GiB" in line for line in lines)
    tried = {line.split("--", 1)[1]: line.split() for line in lines if " --" in line}
    accumulated = "--trainer.accumulate_grad_batches"
    assert {options: (row[0], "not" in row) for options, row in tried.items()} == {
        "trainer.precision=bf16-mixed": ("28.9", True),
        "trainer.precision=bf16-true": ("46.7", True),
        f"data.batch_size=2 {accumulated}=4": ("23.3", False),
        f"data.batch_size=1 {accumulated}=8": ("18.9", False),
        "data.batch_size=2": ("20.0", False),
    }
    assert tried["trainer.precision=bf16-mixed"][2] == "6.061"  # ms: 10^12 at 165 TFLOP/s
    assert ([*["--data.batch_size=8"], "--trainer.precision=bf16-mixed"], (8, 0), "nothing") in formula.rehearsals


@pytest.mark.usefixtures("formula")
def test_modules_are_found_as_by_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A script's path has not the folder in which it is called."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    plan.run(plan.Options(device="A30", options=["--data.batch_size=1"]))
    assert str(tmp_path) in sys.path


@pytest.mark.usefixtures("formula")
def test_a_run_that_may_fit_is_reported_so(capsys: pytest.CaptureFixture[str]) -> None:
    for size, code, word in (("46.7GiB", 0, "fits"), ("46.6GiB", 0, "may not fit"), ("41.9GiB", 1, "does not fit")):
        assert plan.run(plan.Options(memory=size)) == code
        printed = capsys.readouterr().out
        assert f"46.7 GiB, {word}" in printed
        assert ("need less" in printed) == (word != "fits")


def test_the_reason_of_a_missing_plan_is_printed_once(formula: Formula, capsys: pytest.CaptureFixture[str]) -> None:
    formula.refused = Unplanned("values (mine.py, line 3)")
    assert plan.run(plan.Options(device="H200")) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.endswith("(mine.py, line 3)")
    formula.refused = Unplanned("model.size: expected xl", is_wrong_call=True)
    with pytest.raises(UsageError, match="expected xl"):
        plan.run(plan.Options(device="H200"))


def test_only_a_run_that_does_not_fit_has_remedies(formula: Formula, capsys: pytest.CaptureFixture[str]):
    assert plan.run(plan.Options(device="H200", memory="60GiB")) == 0
    assert [what for *_, what in formula.rehearsals] == ["batch", "context"]
    assert "with" not in capsys.readouterr().out.splitlines()[-1].split()
    assert plan.run(plan.Options(memory="16GiB")) == 1
    assert "none of" in capsys.readouterr().out
    assert formula.rehearsals[-1][0] == [
        *("--trainer.precision=bf16-true", "--data.batch_size=1", "--trainer.accumulate_grad_batches=8")
    ]


@pytest.mark.parametrize(
    "text, size", [("80GiB", 80 << 30), ("8 GB", 8 * 10**9), ("1.5g", 1_500_000_000), ("24gib", 24 << 30)]
)
def test_a_size_is_read_with_its_unit(text: str, size: int) -> None:
    assert plan.size_bytes(text, "memory", "80GiB") == size


NO_SIZES = ["0GiB", "8GX", "-8GiB", "GiB", "1e400GiB", "80", "inf", "nan", "99999999TB", "9" * 400 + "GiB", "0.0001kB"]


def test_wrong_sizes_and_devices_are_refused() -> None:
    options = [plan.Options(memory=text) for text in NO_SIZES]
    messages = {
        wrong_options.memory[:20]: refusal(UsageError, partial(plan.run, wrong_options))
        for wrong_options in options
        if wrong_options.memory
    }
    assert_stored("cli/plan: no size", messages)
    with pytest.raises(UsageError, match="did you mean H100") as error:
        plan.run(plan.Options(device="H10O"))
    assert "\n" not in str(error.value)


def test_too_large_weights_have_alternatives(capsys: pytest.CaptureFixture[str]):
    """On a device that holds half of its weights. A batch of 1 leaves few alternatives: each is rehearsed for real."""
    model = [
        "--model.size=small",
        "--model.d_model=128",
        "--model.num_heads=4",
        "--model.num_layers=1",
        "--data.context_length=16",
        "--data.batch_size=1",
    ]
    weights_bytes = 4 * preset("small", d_model=128, num_heads=4, num_layers=1).num_parameters()
    options = plan.Options(memory=f"{weights_bytes // 2 // 1000}kB", options=model)
    assert plan.run(options) == 1
    printed = capsys.readouterr().out
    assert "optimizer" in printed
    assert "does not fit" in printed
    assert "the smallest GPU that fits: " in printed
    assert "not even a batch of 1" in printed
    assert "--trainer.precision=bf16-true" in printed


@pytest.mark.parametrize("needs_gib, name", [(23.0, "NVIDIA GeForce RTX 4090"), (40.0, "NVIDIA L40S"), (1e4, None)])
def test_the_smallest_gpu_of_the_table_is_found(needs_gib: float, name: str | None) -> None:
    gpu = smallest_gpu(int(needs_gib * (1 << 30)))
    assert (gpu and gpu.name) == name


def test_outputs_of_plan(formula: Formula, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = tmp_path / "memory.svg"
    options = {"allocations": True, "plot": "memory_timeline", "output": drawn}
    assert plan.run(plan.Options(device="A30", options=["--data.batch_size=1"], **options)) == 0
    assert "peak 0.68 KiB" in drawn.read_text()
    printed = capsys.readouterr().out
    assert "mm, head, model.py:7" in printed
    assert plan.run(plan.Options(device="A30", options=["--data.batch_size=1"])) == 0
    assert "model.py:7" not in capsys.readouterr().out
    given = {"device": "A30", "allocations": True, "options": ["--data.batch_size=8"]}
    assert plan.run(plan.Options(format="latex", **given)) == 1
    assert capsys.readouterr().out.count(r"\begin{tabular}") == 5  # phases, the largest, saved, moments, remedies
    assert plan.run(plan.Options(output=tmp_path / "plan.typ", **given)) == 1
    assert (tmp_path / "plan.typ").read_text().count("#table(") == 5
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "wrong, subject",
    [
        ({"plot": "phases", "output": Path("a.svg")}, "plot"),
        ({"plot": "memory_timeline"}, "plot"),
        ({"output": Path("a.svg")}, "output"),
        ({"format": "csv"}, "format"),
        ({"plot": "memory_timeline", "output": Path("a.gif")}, "plot"),
    ],
)
def test_a_wrong_plot_is_refused_before_anything_is_rehearsed(wrong: dict[str, Any], subject: str) -> None:
    with pytest.raises(UsageError, match=f"^{subject}: expected"):
        plan.Options(**wrong)
