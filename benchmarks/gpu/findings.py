"""What a part finds: tables, figures and whether an aim was met, on disk as soon as they are known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lm_profiler.record.files import write_whole
from lm_profiler.report.tables.formats import markdown
from lm_profiler.report.tables.table import text_table

FILE, PAGE = "findings.json", "findings.md"


@dataclass(frozen=True)
class Aim:
    """``met`` is None where it cannot be told: on the CPU, or because nothing was found."""

    what: str
    aim: str
    found: str
    met: bool | None


@dataclass
class Findings:
    """Of one part; each addition is written at once, because the part may be killed at any time."""

    folder: Path
    figures: dict[str, Any] = field(default_factory=dict)
    aims: dict[str, Aim] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)

    def add(self, **figures: Any) -> None:
        """Figures for programs, in SI units."""
        self.figures |= figures
        self._write()

    def aim(self, what: str, aim: str, found: str, met: bool | None) -> None:
        """What was aimed at, and what was found."""
        self.aims[what] = Aim(what, aim, found, met)
        self._write()

    def note(self, text: str) -> None:
        """A sentence that a reader must know."""
        self.notes.append(text)
        self._write()

    def text(self, title: str, text: str) -> None:
        """Markdown for people, in the place of an earlier one of that title."""
        self.texts[title] = text
        self._write()

    def table(
        self,
        title: str,
        headings: Sequence[str],
        rows: Sequence[Sequence[str]],
        left: int = 1,
    ) -> None:
        """A table for people; ``left`` columns are words."""
        self.text(title, markdown(text_table(headings, rows, left=left)))

    def _write(self) -> None:
        told = {
            "figures": self.figures,
            "aims": [asdict(aim) for aim in self.aims.values()],
            "notes": self.notes,
        }
        write_whole(self.folder / FILE, json.dumps(told, indent=1) + "\n")
        notes = [f"- {note}\n" for note in self.notes]
        texts = [f"\n**{title}**\n\n{text}" for title, text in self.texts.items()]
        write_whole(self.folder / PAGE, "".join((*notes, *texts)))


def read_findings(folder: Path) -> dict[str, Any]:
    """What the part in ``folder`` has written so far; empty figures, aims and notes where that is nothing."""
    try:
        found: dict[str, Any] = json.loads((folder / FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return {"figures": {}, "aims": [], "notes": []}
    return found


def shown(
    value: float | None, unit: str = "", digits: int = 4, scale: float = 1.0
) -> str:
    """A figure in ``digits`` significant digits, and all before its point; "unknown" where there is none."""
    if value is None:
        return "unknown"
    value *= scale
    return (
        f"{value:,.{digits}g}{unit}"
        if abs(value) < 10**digits
        else f"{value:,.0f}{unit}"
    )
