"""Text of a record or of a folder's name, made safe for a terminal."""

from __future__ import annotations


def printable(text: str, keep: str = "\n\t") -> str:
    """``text`` with everything that a terminal would obey spelled out: ``\\x1b`` for the escape character.

    That is all that Unicode calls not printable: C0 and C1 controls, the marks that turn the direction of writing,
    lone surrogates. ``keep`` are the controls that stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def shortened(name: str, most: int = 48) -> str:
    """Labels of any length would leave no room for a picture; its end tells most of one."""
    return name if len(name) <= most else f"{name[: most // 3]}…{name[1 - most + most // 3 :]}"
