"""What is printed, held whole against ``tests/stored/texts/<name>.txt``.

``RENEW=1 make unit PYTEST_ARGS="-k stored"`` (or ``RENEW=1`` before any call of pytest) writes the files anew and shows
what has changed; without it a file that is missing fails its test. A test of a figure asserts its field; a sentence
stands in a stored text.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

TEXTS = Path(__file__).parents[1] / "stored" / "texts"
CHANGES: list[str] = []
"""The diff of each file that was written anew; ``conftest.py`` shows them at the end."""

_VOLATILE = (
    (re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\+00:00)?"), "TIME"),
    (re.compile(r"(Python|torch|Lightning|lm_profiler) \d+\.\d[\w.+]*"), r"\1 VERSION"),
    (re.compile(r"(?<=this machine has )\([^)]*\)"), "(ACCELERATORS)"),
    (re.compile(r"(?<=lm_profiler: trainer: ).*(?=; given )"), "LIGHTNING'S OWN WORDS"),
    (re.compile(r"[ \t]+$", re.MULTILINE), ""),
)


def masked(text: str, **folders: Path | str) -> str:
    """The text with each of the ``folders`` by its name in capitals.

    It is without times, versions, blanks at ends of lines, a machine's accelerators, and what Lightning says by itself.
    """
    for name, folder in folders.items():
        text = text.replace(str(folder), name.upper())
    for pattern, word in _VOLATILE:
        text = pattern.sub(word, text)
    return text


def assert_stored(name: str, cases: Mapping[str, str | Iterable[str]], **folders: Path | str) -> None:
    """Hold what is printed in each case, by the case's name, against the file; ``folders`` as for ``masked``."""
    printed = "\n".join(f"== {case}\n{_text(said)}" for case, said in cases.items())
    text, path = masked(printed, **folders).encode(errors="backslashreplace").decode(), TEXTS / f"{name}.txt"
    stored = path.read_text(encoding="utf-8") if path.exists() else None
    if os.environ.get("RENEW") == "1" and text != stored:
        before, after = (stored or "").splitlines(), text.splitlines()
        CHANGES.append(
            "\n".join(difflib.unified_diff(before, after, f"{name} before", f"{name} now", lineterm="", n=1))
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    assert stored is not None, f"{path} is missing: RENEW=1 writes it"
    assert text.splitlines() == stored.splitlines(), "if this is meant: RENEW=1 writes the file anew and shows the diff"


def _text(said: str | Iterable[str]) -> str:
    text = said if isinstance(said, str) else "\n".join(said)
    return f"{text.rstrip()}\n" if text.strip() else "(nothing)\n"
