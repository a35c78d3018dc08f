"""What a reader finds in the blocks of a view: its texts, its tables, its charts and its bars."""

from collections.abc import Iterable, Iterator
from typing import Any

from lm_profiler.record.entry import Entry
from lm_profiler.report.views.blocks import Json
from lm_profiler.report.views.registry import VIEWS


def blocks_of_view(view: str, entry: Entry) -> list[Json]:
    """The blocks of a view of ``entry``."""
    return VIEWS[view].answer(entry)


def every_block(blocks: Iterable[Json]) -> Iterator[Json]:
    """The blocks, and those inside of them."""
    for block in blocks:
        yield block
        yield from every_block(block.get("blocks", []))
        for choice in block.get("choices", []):
            yield from every_block(choice["blocks"])
        if block["kind"] == "bars":
            for row in block["rows"]:
                yield from every_block(row.get("inside", []))


def blocks_of_kind(blocks: Iterable[Json], kind: str) -> list[Json]:
    return [block for block in every_block(blocks) if block["kind"] == kind]


def block_titled(blocks: Iterable[Json], title: str) -> Json:
    """The one card or fold whose title begins with ``title``."""
    [found] = [block for block in every_block(blocks) if str(block.get("title", "")).startswith(title)]
    return found


def text_of(blocks: Iterable[Json]) -> str:
    """All paragraphs, a line each."""
    return "\n".join(block["text"] for block in every_block(blocks) if "text" in block)


def table_rows(block: Json) -> list[list[str]]:
    """The titles and the rows of the one table inside of ``block``."""
    [table] = [found for found in every_block([block]) if found["kind"] in ("table", "long table")]
    return [table.get("titles", []), *table["rows"]]


def bars_of(block: Json) -> dict[str, Any]:
    """The rows of the one group of bars inside of ``block``, by title."""
    [bars] = blocks_of_kind([block], "bars")
    return {row["title"]: row for row in bars["rows"]}


def series_of(block: Json) -> dict[str, Any]:
    """The series of the one chart inside of ``block``, by name."""
    [chart] = blocks_of_kind([block], "chart")
    return {series["name"]: series for series in chart["data"]}
