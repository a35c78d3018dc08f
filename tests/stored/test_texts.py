"""Texts that are stored: each belongs to a test, and what varies in them is masked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import stored_texts
from stored_texts import TEXTS, assert_stored, masked

TESTS = Path(__file__).parents[1]
NAMES = sorted(path.relative_to(TEXTS).with_suffix("").as_posix() for path in TEXTS.rglob("*.txt"))


def test_no_stored_text_is_left_without_its_test() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    for name in NAMES:
        if f'"{name}"' in code:
            continue
        cases = re.findall(r"^== (.*?): ", (TEXTS / f"{name}.txt").read_text(encoding="utf-8"), re.MULTILINE)
        assert cases, name
        assert [case for case in cases if f'"{name}: {case}"' not in code] == [], name


def test_what_varies_is_masked(tmp_path: Path) -> None:
    text = f"torch 2.13.0+cpu at 2026-01-02T03:04:05+00:00 in {tmp_path}/a  \nnext"
    assert masked(text, here=tmp_path) == "torch VERSION at TIME in HERE/a\nnext"


def test_a_text_is_compared_whole_and_written_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_texts, "TEXTS", tmp_path)
    monkeypatch.setattr(stored_texts, "CHANGES", changes := [])
    monkeypatch.delenv("RENEW", raising=False)
    with pytest.raises(AssertionError):
        assert_stored("room/a", {"first": "said"})
    monkeypatch.setenv("RENEW", "1")
    assert_stored("room/a", {"first": "said", "second": []})
    monkeypatch.delenv("RENEW")
    assert (tmp_path / "room" / "a.txt").read_text() == "== first\nsaid\n\n== second\n(nothing)\n"
    assert_stored("room/a", {"first": ["said"], "second": ""})
    with pytest.raises(AssertionError):
        assert_stored("room/a", {"first": "said", "second": "more"})
    monkeypatch.setenv("RENEW", "1")
    for part in ("two", "one"):  # of one file, whichever comes first
        assert_stored(f"room/b: {part}", {"case": f"said by {part}"})
    monkeypatch.delenv("RENEW")
    assert (tmp_path / "room" / "b.txt").read_text() == "== one: case\nsaid by one\n\n== two: case\nsaid by two\n"
    assert_stored("room/b: two", {"case": "said by two"})
    with pytest.raises(AssertionError):
        assert_stored("room/b: two", {"another": "said by two"})
    assert [line for line in changes[0].splitlines() if line.startswith("+")][1:3] == ["+== first", "+said"]
