"""Lets the tests here import the trace made by hand."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
