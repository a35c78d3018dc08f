"""A comparison for people: the same rows as a terminal's table and as Markdown; and as JSON for programs."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterable, Sequence
from math import ceil
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lm_profiler.analysis.compare.comparison import Comparison, Compilation, PartChange
from lm_profiler.analysis.compare.differences import Difference
from lm_profiler.analysis.compare.ratio import CONFIDENCE, MARGIN, RatioInterval
from lm_profiler.record.quantities import MEMORY, TIMES, TOKENS_PER_S
from lm_profiler.record.text import printable

_SURE = f"{CONFIDENCE * 100:.0f} %"
HEADER = ("median (ms)", "A", "B", "B - A", "of A's step", f"B / A [{_SURE} interval]", "verdict")
_STYLES = {"FASTER": "green", "LESS": "green", "SLOWER": "red", "MORE": "red", "UNCLEAR": "yellow"}
_WIDTH = 120
_SHOWN = 3  # phases that a verdict names


def as_json(comparison: Comparison) -> str:
    """Every field of the comparison, in SI units."""
    return json.dumps(dataclasses.asdict(comparison), indent=1) + "\n"


def as_terminal(comparison: Comparison, colour: bool = False) -> str:
    """Differences, table, verdict and notes, as wide as they must be."""
    text = io.StringIO()
    system: Literal["standard"] | None = "standard" if colour else None
    console = Console(file=text, width=_WIDTH, force_terminal=colour, color_system=system, highlight=False)
    for line in opening(comparison):
        console.print(Text(printable(line, keep="")), soft_wrap=True)
    console.print()
    console.print(_table(comparison))
    console.print()
    for line in closing(comparison):
        console.print(Text(printable(line, keep="")), soft_wrap=True)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def as_markdown(comparison: Comparison) -> str:
    """The same as Markdown; nothing in a name or a value is taken for markup."""
    lines = [f"{line[: len(line) - len(line.lstrip())]}- {_escaped(line.lstrip())}" for line in opening(comparison)]
    lines += ["", _piped(HEADER), _piped([":--", *["--:"] * 5, ":--"])]
    lines += [_piped(map(_escaped, cells)) for cells in rows(comparison)]
    lines += ["", *(f"- {_escaped(line)}" for line in closing(comparison))]
    return "\n".join(lines) + "\n"


def opening(comparison: Comparison) -> list[str]:
    """What is compared, and in what it differs."""
    lines = [f"{label}: {_folders(folders)}" for label, folders in (("A", comparison.a), ("B", comparison.b))]
    if comparison.unlike:
        lines += ["not the same work on the same device (A → B):", *_listed(comparison.unlike)]
    for what, differences in (("configs", comparison.config), ("environments", comparison.environment)):
        if differences:
            lines += [f"{what} differ (A → B):", *_listed(differences)]
        else:
            lines.append(f"{what}: the same" if differences is not None else f"{what}: of A or B unknown")
    return lines


def rows(comparison: Comparison) -> list[list[str]]:
    """A row for the step, each part of it, tokens/s and each peak; texts, one for each of ``HEADER``."""
    parts = (comparison.step, comparison.forward_backward, *comparison.phases)
    found = [_part_cells(row) for row in parts]
    if (rate := comparison.tokens) is not None:
        a, b, more = (
            TOKENS_PER_S.show(x, unit=False) for x in (rate.a_per_s, rate.b_per_s, rate.b_per_s - rate.a_per_s)
        )
        found.append(
            [
                TOKENS_PER_S.title,
                a,
                b,
                _signed(more),
                "",
                _ratio(rate.interval, rate.a_per_s, rate.b_per_s),
                rate.verdict,
            ]
        )
    for row in comparison.memory:
        peak = MEMORY[row.reading]
        a, b, more = (peak.show(x, unit=False) for x in (row.a_bytes, row.b_bytes, row.b_bytes - row.a_bytes))
        found.append(
            [
                f"{peak.title} (GiB)",
                a,
                b,
                _signed(more),
                "",
                _ratio(row.interval, row.a_bytes, row.b_bytes),
                row.verdict,
            ]
        )
    return found


def closing(comparison: Comparison) -> list[str]:
    """The verdict, what it rests on, what to be careful with, and what to do where it is unclear."""
    lines = [f"verdict: {verdict_line(comparison)}"]
    if comparison.compilation is not None:
        lines.append(f"compilation: {_compilation_line(comparison.compilation)}")
    lines += [f"note: {note}" for note in comparison.notes]
    lines.append(
        f"note: the step's interval holds with {_SURE}, those of its parts with {_SURE} all together; "
        f"a change of less than {MARGIN:.0%} is not called one"
    )
    if comparison.step.verdict == "UNCLEAR":
        lines.append(f"next: {_how_to_be_sure(comparison)}")
    return lines


def verdict_line(comparison: Comparison) -> str:
    """The step's word with its figures, and the phases that made it."""
    step = comparison.step
    if step.interval is None:
        return f"{step.verdict}: cannot be told from so few or so unlike steps, repeat"
    change, low, high = (f"{x - 1.0:+.1%}" for x in (step.interval.ratio, step.interval.low, step.interval.high))
    line = f"{step.verdict}: B's step against A's {change} [{low}, {high}]"
    if step.verdict not in ("FASTER", "SLOWER"):
        return line
    causes = [row for row in comparison.phases if not _small(row)][:_SHOWN]
    named = ", ".join(f"{TIMES[row.part].title} {row.of_step:+.1%}" for row in causes)
    return f"{line}; of A's step: {named}" if named else line


def _compilation_line(found: Compilation) -> str:
    other = "A" if found.compiled == "B" else "B"
    if found.cost_s <= 0.0:
        return (
            f"{found.compiled}'s first steps took no longer than {other}'s: its cost was paid before, or is not in them"
        )
    line = f"{found.compiled}'s first steps cost {found.cost_s:.3g} s more than {other}'s"
    if found.paid_back_steps is None:
        return f"{line}; that a step saves anything is not known, so neither is when it is paid back"
    steps, low, high = (f"{ceil(n):,}" for n in found.paid_back_steps)
    saved = TIMES["step"].show(found.saved_s)
    return f"{line}; at {saved} saved a step it is paid back after {steps} steps [{low}, {high}]"


def _small(row: PartChange) -> bool:
    """It moves the step by less than is called a change: whatever its own word, it is no news."""
    return row.of_step is not None and abs(row.of_step) < MARGIN


def _how_to_be_sure(comparison: Comparison) -> str:
    if comparison.detectable is None:
        return "measure more steps (--stages.measure_steps=30), and repeat both, three times or more, A and B in turn"
    told = f"a change of {comparison.detectable:.1%} or more" if comparison.detectable < 1.0 else "no change under 100%"
    if len(comparison.a) == len(comparison.b) == 1:
        more = "repeat both, three times or more, A and B in turn; or measure longer (--stages.until_ci=0.005)"
    else:
        more = f"repeat more often than {len(comparison.a)} and {len(comparison.b)} times, A and B in turn"
    return f"runs like these would tell {told}; to tell less, {more}"


def _table(comparison: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in HEADER:
        table.add_column(name, justify="left" if name in (HEADER[0], HEADER[-1]) else "right", no_wrap=True)
    small = {TIMES[row.part].title for row in comparison.phases if _small(row)}
    for cells in rows(comparison):
        *texts, word = map(Text, cells)
        word.style = _STYLES.get(word.plain, "")
        table.add_row(*texts, word, style="bold" if cells[0] == "step" else "dim" if cells[0] in small else None)
    return table


def _part_cells(row: PartChange) -> list[str]:
    time = TIMES[row.part]
    of_step = "" if row.of_step is None else f"{row.of_step:+.1%}"
    a, b, more = (time.show(x, unit=False) for x in (row.a_s, row.b_s, row.difference_s))
    return [time.title, a, b, _signed(more), of_step, _ratio(row.interval, row.a_s, row.b_s), row.verdict]


def _ratio(interval: RatioInterval | None, a: float, b: float) -> str:
    """Nothing where there is no ratio; what to do where it says nothing."""
    if interval is None:
        return "cannot be told, repeat" if a > 0.0 and b > 0.0 else ""
    ratio, low, high = (f"{x:.3f}" if x < 10 else f"{x:.3g}" for x in (interval.ratio, interval.low, interval.high))
    return f"{ratio} [{low}, {high}]"


def _signed(number: str) -> str:
    return number if number.startswith("-") else f"+{number}"


def _folders(folders: Sequence[str]) -> str:
    return folders[0] if len(folders) == 1 else f"{len(folders)} runs: {', '.join(folders)}"


def _listed(differences: Iterable[Difference]) -> list[str]:
    return [f"  {row.path}: {_value(row.a)} → {_value(row.b)}" for row in differences]


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _escaped(text: str) -> str:
    """For Markdown, also where it lets HTML through."""
    text = printable(text, keep="").replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join(f"\\{c}" if c in "\\`*_[]|#~" else c for c in text)


def _piped(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
