"""Several ranks do not feel that they are observed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from scripts import SUPPORT


def test_ranks_train_to_the_same_bits_with_and_without_instruments(tmp_path: Path) -> None:
    """Also where some backwards talk to no other rank, under a communication hook of the user's, and sharded."""
    root = str(SUPPORT.parent.parent)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    command = [sys.executable, str(SUPPORT / "ranks_trained.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    steps = {"DDP, accumulating under no_sync": 6, "DDP, no_sync by hand": 8}
    for rank in json.loads(done.stdout.splitlines()[-1]):
        assert len(rank) == 5
        for way, (same, taken, without, observed) in rank.items():
            assert same, way
            assert taken == steps.get(way, 24)
            assert without == observed == (24 if "hook" in way else 0)
