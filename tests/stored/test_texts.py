"""Texts that are stored: each belongs to a test that compares it."""

import re
from pathlib import Path

import pytest
from stored_texts import TEXTS, assert_stored

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


def test_a_text_that_differs_from_the_stored_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RENEW", raising=False)
    with pytest.raises(AssertionError):
        assert_stored("models/meanings", {"xl": "something else"})
