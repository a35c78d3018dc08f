"""A logger that takes whatever it is told, and keeps nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch.loggers import Logger


class SilentLogger(Logger):
    """In the place of anybody's: it has every method, and so has its ``experiment``."""

    save_dir = log_dir = root_dir = "nowhere"
    name = "silent"
    version = 0

    @property
    def experiment(self) -> Any:
        """Takes part in nothing."""
        return _Silence()

    def log_metrics(self, *_: Any, **__: Any) -> None:
        """Nobody reads them."""

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Nobody reads them."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Silence()


class _Silence:
    """Answers everything by itself."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __getitem__(self, _: Any) -> Any:
        return self

    def __setitem__(self, *_: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass
