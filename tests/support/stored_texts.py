"""What is printed, held whole against ``tests/stored/texts/<name>.txt``.

``make renew`` (``RENEW=1`` with pytest, in one process) writes the files anew and shows what has changed; without it a
file that is missing fails its test. A test of a figure asserts its field; a sentence stands in a stored text.
"""

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

    It is without times, versions, blanks at ends of lines, a machine's accelerators, and Lightning's own messages.
    """
    for name, folder in folders.items():
        text = text.replace(str(folder), name.upper())
    for pattern, word in _VOLATILE:
        text = pattern.sub(word, text)
    return text.encode(errors="backslashreplace").decode()


def assert_stored(name: str, cases: Mapping[str, str | Iterable[str]], **folders: Path | str) -> None:
    """Hold what is printed in each case, by the case's name, against the file; ``folders`` as for ``masked``.

    Args:
        name: Of the file, without its suffix: ``room/surface``. Of ``room/surface: part`` it is the cases of that part
            alone, so that several tests share a file.
    """
    file, _, part = name.partition(": ")
    printed = {f"{part}: {case}" if part else case: _text(text) for case, text in cases.items()}
    printed = {masked(case): masked(text, **folders) for case, text in printed.items()}
    path = TEXTS / f"{file}.txt"
    stored = _cases(path)
    mine = {case: text for case, text in stored.items() if not part or case.startswith(f"{part}: ")}
    if os.environ.get("RENEW") == "1" and printed != mine:
        others = {case: text for case, text in stored.items() if case not in mine}
        CHANGES.append("\n".join(_changes(name, mine, printed)))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_file(dict(sorted({**others, **printed}.items())) if part else printed), encoding="utf-8")
        return
    assert path.exists(), f"{path} is missing: RENEW=1 writes it"
    assert printed == mine, "if this is meant: RENEW=1 writes the file anew and shows the diff"


def _cases(path: Path) -> dict[str, str]:
    """What the file holds, by case."""
    found = re.split(r"^== (.*)\n", path.read_text(encoding="utf-8") if path.exists() else "", flags=re.MULTILINE)
    return {case: f"{text.rstrip()}\n" for case, text in zip(found[1::2], found[2::2], strict=True)}


def _file(cases: Mapping[str, str]) -> str:
    return "\n".join(f"== {case}\n{text}" for case, text in cases.items())


def _changes(name: str, before: Mapping[str, str], now: Mapping[str, str]) -> Iterable[str]:
    texts = (_file(cases).splitlines() for cases in (before, now))
    return difflib.unified_diff(*texts, f"{name} before", f"{name} now", lineterm="", n=1)


def _text(text: str | Iterable[str]) -> str:
    text = text if isinstance(text, str) else "\n".join(text)
    return f"{text.rstrip()}\n" if text.strip() else "(nothing)\n"
