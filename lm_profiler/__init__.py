"""A training-loop profiler for language models on Lightning.

Importing this package imports neither torch nor Lightning: ``report``, ``compare`` and ``--help`` must answer at
once. The instruments for your own ``Trainer`` are in ``lm_profiler.callbacks``.
"""

__all__ = ["__version__"]

__version__: str


def __getattr__(name: str) -> str:
    if name == "__version__":
        # Only when asked for: reading it takes 4 ms, and every Trainer of an environment with this package imports it.
        from importlib.metadata import version

        return version("lm_profiler")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
