"""A training-loop profiler for language models on Lightning.

Importing this package imports neither torch nor Lightning: ``report``, ``compare`` and ``--help`` must answer at
once. The instruments for your own ``Trainer`` are in ``lm_profiler.callbacks``.
"""

import os
from importlib.metadata import version

if os.name != "posix":
    raise ImportError("lm_profiler: expected a POSIX system such as Linux or macOS, given another; on Windows use WSL")

__all__ = ["__version__"]

__version__ = version("lm_profiler")
