"""JSON Schemas of our files, from the types that read and write them.

They hold for the files of every version: what only some versions write is not required. Of words (``enum``) they name
those of this version.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lm_profiler.record.improve import ImproveRecord
from lm_profiler.record.kernels import KernelTable
from lm_profiler.record.quantities import QUANTITIES, Quantity
from lm_profiler.record.run import Part, RankEnd, RunRecord
from lm_profiler.record.sweep import CellOutcome, SweepPlan

FORMS: dict[str, type[Part]] = {
    "run": RunRecord,
    "kernels": KernelTable,
    "sweep": SweepPlan,
    "outcome": CellOutcome,
    "improve": ImproveRecord,
    "rank_end": RankEnd,
}
"""What each kind of file holds."""


def schemas() -> Iterator[tuple[str, dict[str, Any]]]:
    """The schema of each kind, by the name of its own file; figures are described as the registry does."""
    for name, form in FORMS.items():
        schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **form.model_json_schema()}
        for quantity in QUANTITIES.values() if form is RunRecord else ():
            _describe(schema, quantity)
        yield f"{name}.schema.json", schema


def _describe(schema: dict[str, Any], quantity: Quantity) -> None:
    """Add what a quantity is to its field; none for one in an object without fixed fields, such as ``time``."""
    field = schema
    for key in quantity.path.split("."):
        kinds = [field, *field.get("anyOf", ())]
        parts = [schema["$defs"][kind["$ref"].rpartition("/")[2]] if "$ref" in kind else kind for kind in kinds]
        field = next((part["properties"][key] for part in parts if key in part.get("properties", ())), {})
    if field and "description" not in field:
        unit = "" if quantity.unit in ("1", "text") else f" ({quantity.unit})"
        field["description"] = quantity.meaning + unit
