"""Text of a record or of a folder's name, made safe for a terminal."""

from __future__ import annotations

from collections.abc import Iterable


def printable(text: str, keep: str = "\n\t") -> str:
    """``text`` with everything that a terminal would obey spelled out: ``\\x1b`` for the escape character.

    That is all that Unicode calls not printable: C0 and C1 controls, the marks that turn the direction of writing,
    lone surrogates. ``keep`` are the controls that stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def well_formed(text: str) -> str:
    """``text`` with lone surrogates spelled out, as names of files have them: no file takes them, nor JSON."""
    return text.encode("utf-8", "backslashreplace").decode()


def shortened(name: str, most: int = 48) -> str:
    """Labels of any length would leave no room for a picture; its end tells most of one."""
    return name if len(name) <= most else f"{name[: most // 3]}…{name[1 - most + most // 3 :]}"


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 3``, or ``ranks 0, 2–5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    said = ", ".join("–".join(map(str, run)) for run in runs)
    return f"ranks {said}" if len(runs) > 1 or len(runs[:1] and runs[0]) > 1 else f"rank {said}"
