"""What the boundary prints on a terminal."""

import sys

import pytest

from lm_profiler.measure.boundary import Guard, first_line, print_message


def test_control_characters_of_a_message_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    part = Guard("tokens_in", print_message)
    part.run(_raise, ValueError("\x1b[2Jgone"))
    printed = capsys.readouterr().err
    assert "\x1b" not in printed
    assert printed.endswith("\\x1b[2Jgone\n")
    assert len(printed.splitlines()) == 1


def test_a_long_message_is_cut_and_loses_passwords() -> None:
    printed = first_line(RuntimeError("word " * 100))
    assert printed == "word " * 59 + "word…"
    assert first_line(RuntimeError("x" * 400)) == "x" * 299 + "…"
    assert first_line(RuntimeError("x" * 300)) == "x" * 300
    error = OSError("cannot reach https://ann:correct-horse@host/data?access_token=correct-horse")
    assert first_line(error).split() == ["cannot", "reach", "https://***@host/data?access_token=***"]


def test_a_message_that_cannot_be_printed_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        encoding = "utf-8"

        def flush(self) -> None:
            raise ValueError("I/O operation on closed file")

    monkeypatch.setattr(sys, "stderr", Closed())
    print_message("nobody hears this")


def _raise(error: Exception) -> None:
    raise error
