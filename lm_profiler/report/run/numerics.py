"""The audit of a run's precision, in a few lines."""

from __future__ import annotations

from lm_profiler.record.run import NumericsFacts
from lm_profiler.report.tables.table import Table, text_table


def numerics_headline(facts: NumericsFacts) -> str:
    """Loss in both, and how far output and gradients are off."""
    losses = " against ".join("not finite" if x is None else f"{x:.6g}" for x in (facts.loss, facts.reference_loss))
    return (
        f"numerics against float32: loss {losses}, output off by {_share(facts.output_error)}, "
        f"gradients by {_share(facts.gradient_error)}"
    )


def numerics_table(facts: NumericsFacts) -> Table:
    """A row for each kind of module."""
    rows = []
    for kind in facts.kinds:
        dtypes = (", ".join(names) for names in (kind.parameters, kind.outputs, kind.gradients))
        off = _share(kind.gradient_error) if kind.gradients else ""
        rows.append([f"{kind.modules} {kind.kind}", *dtypes, off])
    titles = ("modules", "parameters", "outputs", "gradients", "off by")
    return text_table(titles, rows, left=4, above=[numerics_headline(facts)])


def _share(error: float | None) -> str:
    return "unknown" if error is None else f"{100 * error:.2g}%"
