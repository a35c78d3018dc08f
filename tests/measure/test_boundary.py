"""What the boundary says on a terminal."""

import sys

import pytest

from lm_profiler.measure.boundary import Guard, first_line, print_message


def test_a_message_is_no_order_to_the_terminal_and_is_cut_without_passwords(capsys: pytest.CaptureFixture[str]) -> None:
    part = Guard("tokens_in", print_message)
    part.run(_raise, ValueError("\x1b[2Jgone"))
    told = capsys.readouterr().err
    assert "\x1b" not in told
    assert told.endswith("\\x1b[2Jgone\n")
    assert len(told.splitlines()) == 1
    # A long message is cut at a word and an address loses its password.
    told = first_line(RuntimeError("word " * 100))
    assert told == "word " * 59 + "word…"
    assert first_line(RuntimeError("x" * 400)) == "x" * 299 + "…"
    assert first_line(RuntimeError("x" * 300)) == "x" * 300
    error = OSError("cannot reach https://ann:correct-horse@host/data?access_token=correct-horse")
    assert first_line(error).split() == ["cannot", "reach", "https://***@host/data?access_token=***"]


def test_what_cannot_be_said_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        encoding = "utf-8"

        def flush(self) -> None:
            raise ValueError("I/O operation on closed file")

    monkeypatch.setattr(sys, "stderr", Closed())
    print_message("nobody hears this")


def _raise(error: Exception) -> None:
    raise error
