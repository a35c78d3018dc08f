"""``python -m benchmarks.simulated_gpu COMMAND…``: the command, and all that it starts, on the simulated GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.simulated_gpu.build import build


def environment(built: Path) -> dict[str, str]:
    """What a command needs to find the simulated GPU, which is compiled under ``built``."""
    libraries = build(built)
    return {
        "LD_PRELOAD": os.pathsep.join(map(str, libraries)),
        "LD_LIBRARY_PATH": str(built),
    }


def main() -> int:
    if len(sys.argv) < 2:
        print("usage: python -m benchmarks.simulated_gpu COMMAND…", file=sys.stderr)
        return 2
    cuda = torch.version.cuda
    if cuda is None or not cuda.startswith("13."):
        print(
            f"torch: expected a build for CUDA 13, given {torch.__version__}",
            file=sys.stderr,
        )
        return 2
    try:
        os.environ.update(
            environment(Path("logs", "simulated_gpu", torch.__version__).resolve())
        )
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"the simulated GPU cannot be compiled: {error}", file=sys.stderr)
        return 2
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        print(f"{sys.argv[1]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main())
