"""Calls that are refused: with exit code 2, on stderr alone, in two lines at most."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from stored_texts import assert_stored, masked

from lm_profiler.cli.main import main


def printed_refusal(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the message about a wrong call."""
    assert main([*arguments]) == 2, arguments
    out, err = capsys.readouterr()
    assert out == "", arguments
    assert err.startswith("lm_profiler: "), arguments
    assert "usage:" not in err, arguments
    assert len(err.splitlines()) <= 2, arguments
    return err


def assert_refused_as_stored(
    name: str,
    calls: Iterable[Sequence[str]],
    capsys: pytest.CaptureFixture[str],
    first: Sequence[str] = (),
    **folders: Path | str,
) -> None:
    """Hold the message about each of ``calls`` against the stored text; ``first`` are arguments that all have."""
    messages = {}
    for call in calls:
        case = masked(" ".join(call), **folders).replace("\n", "\\n")
        messages[case[:100] or "no arguments"] = printed_refusal([*call[:1], *first, *call[1:]], capsys)
    assert_stored(name, messages, **folders)
