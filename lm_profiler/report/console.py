"""The console that reports are printed to: nothing in a record or a name is an order to the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from lm_profiler.record.text import printable


class PlainConsole(Console):
    """Shows every text that it is given, cells of tables too, with control characters spelled out and no markup."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **{**options, "markup": False, "emoji": False})
