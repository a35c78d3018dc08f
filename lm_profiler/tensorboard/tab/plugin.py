"""The plugin that TensorBoard finds: which address answers what."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorboard.backend.http_util import Respond
from tensorboard.errors import InvalidArgumentError
from tensorboard.plugins.base_plugin import FrontendMetadata, TBContext, TBPlugin
from werkzeug.wrappers import Request, Response

from lm_profiler.record.extras import MissingExtra
from lm_profiler.record.reading import only_below
from lm_profiler.record.run import RecordError
from lm_profiler.report.page.answers import COLOURS
from lm_profiler.report.page.page import STATIC
from lm_profiler.tensorboard.tab import tab_answers as answers
from lm_profiler.tensorboard.tab.sending import send, send_perfetto, wheel_folder
from lm_profiler.usage_error import UsageError

Handler = Callable[[Request], Response]


class LMProfilerPlugin(TBPlugin):  # type: ignore[misc]  # it has no types
    """The tab "LM Profiler". It keeps no state: every request reads the log folder, so a reload shows what is new."""

    plugin_name = "lm_profiler"

    def __init__(self, context: TBContext) -> None:
        self._logdir = Path(context.logdir) if context.logdir else None

    def frontend_metadata(self) -> FrontendMetadata:
        return FrontendMetadata(es_module_path="/static/index.js", tab_name="LM Profiler")

    def is_active(self) -> bool:
        """Whether there is a run below the log folder, or was one that never ended."""
        folders = () if self._logdir is None else os.walk(self._logdir)
        return any("run.json" in files or "sweep.json" in files for _, _, files in folders)

    def get_plugin_apps(self) -> dict[str, Callable[..., Any]]:
        handlers: dict[str, Handler] = {
            "/colours": self._json(lambda _, __: COLOURS),
            "/runs": self._json(lambda root, _: answers.listing(root)),
            "/run": self._json(lambda root, request: answers.run(root, _argument(request, "run"))),
            "/why": self._json(lambda root, request: answers.why(root, _argument(request, "run"))),
            "/ranks": self._json(lambda root, request: answers.ranks(root, _argument(request, "run"))),
            "/kernels": self._json(lambda root, request: answers.kernels(root, _argument(request, "run"))),
            "/compare": self._json(lambda root, request: answers.comparison(root, *map(request.args.getlist, "ab"))),
            "/traces": self._json(lambda root, request: answers.traces(root, _argument(request, "run"))),
            "/trace": self._trace,
            "/plotly.js": lambda request: send(request, wheel_folder("plotly"), "package_data/plotly.min.js"),
            "/static/*": lambda request: send(request, STATIC, _rest(request, "/static/")),
            "/perfetto/*": lambda request: send_perfetto(request, _rest(request, "/perfetto/")),
        }
        return {route: Request.application(_kept_here(handler)) for route, handler in handlers.items()}

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
        path = answers.trace(self._folder(), _argument(request, "run"), _argument(request, "file"))
        return send(request, path.parent, path.name)

    def _folder(self) -> Path:
        if self._logdir is None or not self._logdir.is_dir():
            raise InvalidArgumentError(
                "The LM Profiler tab needs --logdir with one folder on TensorBoard's own machine."
            )
        return self._logdir


def _kept_here(handler: Handler) -> Handler:
    """No page from elsewhere shows what ``handler`` sends in a frame of its own, or takes it for its own script."""

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


def _rest(request: Request, prefix: str) -> str:
    return request.path.partition(prefix)[2]
