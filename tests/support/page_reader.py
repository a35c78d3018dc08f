"""What a browser would find in a page of runs: its tags, its text, and what it holds packed."""

import base64
import gzip
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


def unpacked(text: str) -> bytes:
    """What a browser makes of a packed text: base64, then gzip."""
    return gzip.decompress(base64.b64decode(text, validate=True))


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
        held = [attrs["data-route"] for name, attrs in self.tags if name == "script" and "data-route" in attrs]
        self.plotly = b""
        for route, text in zip(held, self.scripts, strict=False):
            content = unpacked(text)
            if route == "plotly":
                self.plotly = content
            elif route == "runs":
                self.answers["runs", None] = json.loads(content)
            else:
                answer = json.loads(content)
                for place, run in enumerate(answer["names"]):
                    blocks = [column[place] for column in answer["blocks"] if column[place] is not None]
                    self.answers[str(route), run] = blocks

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
        return policy
