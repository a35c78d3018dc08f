"""The audit's lines on the terminal."""

from __future__ import annotations

from pathlib import Path

from made_environment import made_run
from stored_texts import assert_stored

from lm_profiler.record.run_record import NumericsFacts, NumericsKind
from lm_profiler.report.run.run_page import end_tables
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


def test_the_audit_is_told_as_stored(tmp_path: Path) -> None:
    record = made_run(name="x", numerics=FACTS)
    overflowed = record.model_copy(update={"numerics": FACTS.model_copy(update={"loss": None})})
    cases = {"a figure that is unknown": record, "a loss that overflowed": overflowed}
    assert_stored(
        "report/numerics",
        {case: render(end_tables(of, tmp_path), "terminal") for case, of in cases.items()},
        here=tmp_path,
    )
