"""``python -m lm_profiler``: hands each verb to who does it, importing no more than that verb needs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

TRAINER_VERBS = {
    "fit": "profile training steps",
    "validate": "profile the forward pass alone, under no_grad",
    "test": "profile test steps",
    "predict": "profile prediction steps",
}

_HELP = """\
usage: python -m lm_profiler <verb> [options]

{verbs}

  --version   print the version
  --help      print this; `<verb> --help` lists a verb's options

for example: python -m lm_profiler fit --config configs/demo.yaml"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code: 0, 1 for a run that failed, 2 for a wrong call, 130 when interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    first = arguments[0] if arguments else "--help"
    if first in ("-h", "--help"):
        print(_HELP.format(verbs="\n".join(f"  {verb:<11} {does}" for verb, does in TRAINER_VERBS.items())))
        return 0 if arguments else 2
    if first == "--version":
        from lm_profiler import __version__

        print(f"lm_profiler {__version__}")
        return 0
    if first in TRAINER_VERBS:
        os.environ.setdefault(
            "KINETO_LOG_LEVEL", "99"
        )  # its chatter on stderr; read once, when torch is loaded
        from lm_profiler.cli import run

        return run(arguments)
    print(
        f"lm_profiler: expected a verb ({', '.join(TRAINER_VERBS)}), given {first!r}; see --help",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    sys.exit(main())
