"""``python -m lm_profiler``."""

import sys

from lm_profiler.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
