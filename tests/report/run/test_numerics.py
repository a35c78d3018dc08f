"""The audit's lines on the terminal."""

from __future__ import annotations

from pathlib import Path

from lm_profiler.record.run import NumericsFacts, NumericsKind, RunRecord
from lm_profiler.report.run.run_page import end_tables, numerics_headline
from lm_profiler.report.tables.formats import render

FACTS = NumericsFacts(
    loss=6.4203345,
    reference_loss=6.41873,
    output_error=0.0057,
    gradient_error=None,
    kinds=[
        NumericsKind(
            kind="Linear",
            modules=15,
            parameters=["float32"],
            outputs=["bfloat16", "float32"],
            gradients=["float32"],
            gradient_error=None,
        ),
        NumericsKind(kind="SwiGLU", modules=2, parameters=[], outputs=["bfloat16"], gradients=[], gradient_error=None),
    ],
)


def test_what_is_not_finite_is_called_unknown_and_what_has_no_gradients_says_so(tmp_path: Path) -> None:
    record = RunRecord(
        name="x",
        status="ok",
        failure=None,
        verb="fit",
        started="2026-01-01T00:00:00+00:00",
        duration_s=1.0,
        command="",
        config=None,
        numerics=FACTS,
    )
    lines = render(end_tables(record, tmp_path), "terminal").splitlines()
    assert lines[0] == (
        "numerics against float32: loss 6.42033 against 6.41873, output off by 0.57%, gradients by unknown"
    )
    assert lines[1].split()[:5] == ["class", "modules", "parameters", "outputs", "gradients"]
    assert lines[2].split() == ["Linear", "15", "float32", "bfloat16,", "float32", "float32", "unknown"]
    assert lines[3].split() == ["SwiGLU", "2", "none", "bfloat16", "none", "unknown"]


def test_a_loss_that_overflowed_is_called_that() -> None:
    assert "loss not finite against 6.41873" in numerics_headline(FACTS.model_copy(update={"loss": None}))
