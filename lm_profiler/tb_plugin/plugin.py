"""The plugin that TensorBoard finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorboard.plugins import base_plugin


class LMProfilerPlugin(base_plugin.TBPlugin):  # type: ignore[misc]  # it has no types
    """Not written yet."""

    plugin_name = "lm_profiler"

    def get_plugin_apps(self) -> dict[str, Callable[..., Any]]:
        return {}

    def is_active(self) -> bool:
        return False
