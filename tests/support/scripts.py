"""Where the programs are that tests start in processes of their own."""

from pathlib import Path

SUPPORT = Path(__file__).parent
