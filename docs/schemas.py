"""JSON Schemas of our files and of what verbs print as JSON, from the types that read and write them.

They hold for the files of every version: what only some versions write is not required. Of words (``enum``) they name
those of this version.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter

from lm_profiler.analysis.compare.comparison import Comparison
from lm_profiler.analysis.plan.planned import Plan
from lm_profiler.cli.verbs.selftest import SelfTest
from lm_profiler.record.files import Part
from lm_profiler.record.improve_record import ImproveRecord
from lm_profiler.record.kernels import KernelTable
from lm_profiler.record.memory_timeline import MemoryTimeline
from lm_profiler.record.rank_ends import RankEnd
from lm_profiler.record.run_record import RunRecord
from lm_profiler.record.sweep_files import CellOutcome, SweepPlan
from lm_profiler.record.trace_answer import TraceAnswer, TraceComparison, TraceRanks
from lm_profiler.record.watch_files import WatchFiles

# the type of each kind of file, and of what verbs print with ``--format json``
FORMS: dict[str, Any] = {
    "run": RunRecord,
    "kernels": KernelTable,
    "memory_timeline": MemoryTimeline,
    "sweep": SweepPlan,
    "outcome": CellOutcome,
    "improve": ImproveRecord,
    "rank_end": RankEnd,
    "comparison": Comparison,
    "plan": Plan,
    "selftest": SelfTest,
    "watched": WatchFiles,
    "why": TraceAnswer | TraceComparison | TraceRanks,
    "rows": list[dict[str, bool | int | float | str | list[Any] | None]],
}

# which of them each verb prints; ``rows`` are those of its table, their columns called as in the registry
ANSWERS = {
    **dict.fromkeys(("report", "sweep", "collectives", "numerics"), "rows"),
    **dict.fromkeys(("compare", "ab"), "comparison"),
    "plan": "plan",
    "improve": "improve",
    "watch": "watched",
    "trace": "kernels",
    "selftest": "selftest",
    "why": "why",
}


def schemas() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each schema with its file's name; a field is described by its figure, or by the comment beside it."""
    parts = {part.__name__: part for part in (*_parts(), *_classes(FORMS.values()))}
    for name, form in FORMS.items():
        # else it is only written, with what is computed
        read = (
            isinstance(form, type)
            and get_origin(form) is None
            and issubclass(form, Part)
        )
        schema = TypeAdapter(form).json_schema(
            mode="validation" if read else "serialization"
        )
        schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
        for title, described in (("", schema), *schema.get("$defs", {}).items()):
            part = parts.get(title or getattr(form, "__name__", ""))
            if part is not None:
                described.setdefault("description", inspect.getdoc(part))
                for field, text in _comments(part).items():
                    described.get("properties", {}).get(field, {}).setdefault(
                        "description", text
                    )
        yield f"{name}.schema.json", schema


def _parts(of: type[Part] = Part) -> Iterator[type[Part]]:
    for part in of.__subclasses__():
        yield part
        yield from _parts(part)


def _classes(annotations: Iterable[Any]) -> Iterator[type]:
    """The dataclasses that ``annotations`` name, and those that their fields do."""
    for annotation in annotations:
        if dataclasses.is_dataclass(annotation):
            assert isinstance(annotation, type)
            yield annotation
            yield from _classes(get_type_hints(annotation).values())
        yield from _classes(get_args(annotation))


def _comments(part: type[Part]) -> dict[str, str]:
    """The comment above or behind each field."""
    texts, above = {}, list[str]()
    for line in inspect.getsource(part).splitlines():
        if comment := re.fullmatch(r"    # (.*)", line):
            above.append(comment[1])
        elif field := re.match(r"    (\w+): .*?(?:  # (?!type:)(.*))?$", line):
            texts[field[1]] = field[2] or " ".join(above)
            above = []
        else:
            above = []
    return {field: text for field, text in texts.items() if text}
