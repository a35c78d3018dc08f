"""A training-loop profiler for language models on Lightning.

Importing this package imports neither torch nor Lightning, so that ``report``, ``compare``, ``--help`` and the
functions for notebooks, such as ``lm_profiler.load``, answer at once. The instruments for your own ``Trainer`` are in
``lm_profiler.callbacks``; ``lm_profiler.profile`` is for other loops.
"""

from typing import Any

__all__ = [
    "__version__",
    "compare",
    "load",
    "part",
    "plan",
    "profile",
    "register_flops",
    "table",
]

__version__: str


def __getattr__(name: str) -> Any:
    """Import what a program uses of this package only then, so that ``import lm_profiler`` takes no time."""
    if name == "__version__":
        # read only when it is requested, because that takes 4 ms
        from importlib.metadata import version

        return version("lm_profiler")
    if name == "register_flops":
        # Programs call it while they are imported, so it must not import what the notebook needs.
        from lm_profiler.measure.counts.registered import register_flops

        return register_flops
    if name == "part":
        from lm_profiler.measure.code_parts import part

        return part
    if name in __all__:
        from importlib import import_module

        module = "callbacks.own_loop" if name == "profile" else "notebook"
        return getattr(import_module(f"lm_profiler.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
