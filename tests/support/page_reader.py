"""What a browser would find in a page of runs: its tags, its text, and what it holds packed."""

from __future__ import annotations

import json
import lzma
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


def unpacked(text: str) -> bytes:
    """By the other end's words alone: seven bits a character, then LZMA without a header."""
    bits = "".join(f"{ord(character) % 128:07b}" for character in text)
    content = int(bits[: len(bits) // 8 * 8], 2).to_bytes(len(bits) // 8, "big")
    coder = {"id": lzma.FILTER_LZMA1, "dict_size": 1 << 24, "lc": 3, "lp": 0, "pb": 0}
    return lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=[coder]).decompress(content)


def _unpacked(script: str, size: int) -> bytes:
    content = unpacked(script)
    assert len(content) == size
    return content


class Page(HTMLParser):
    """What a browser would find: tags with their attributes, scripts, and the text outside them."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.answers: dict[tuple[str, str | None], Any] = {}
        self.text = ""
        self._inside = ""
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        held = [attrs for name, attrs in self.tags if name == "script" and "data-bytes" in attrs]
        self._packed_script = ("", 0)
        for attrs, script in zip(held, self.scripts, strict=False):
            size = int(attrs["data-bytes"] or "")
            if (route := attrs.get("data-route")) is None:
                self._packed_script = (script, size)
                continue
            content = _unpacked(script, size)
            if route in ("colours", "runs"):
                self.answers[route, None] = json.loads(content)
            else:
                self.answers |= {(route, run): answer for run, answer in json.loads(content).items()}

    @cached_property
    def held_script(self) -> bytes:
        """Plotly, whose four megabytes take a second."""
        return _unpacked(*self._packed_script)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        else:
            self.text += data

    @property
    def policy(self) -> str:
        [policy] = [attrs["content"] for _, attrs in self.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
        assert policy is not None
        return policy
