"""Two ranks over NCCL, one of which is late on its device: it is found, with what it costs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from nccl_ranks import LATE_S, WAYS
from scripts import SUPPORT
from warm import run


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_rank_that_is_late_on_its_device_is_found_with_its_phase_and_what_mending_it_would_save(
    tmp_path: Path,
) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run(str(SUPPORT / "nccl_ranks.py"), str(tmp_path), environment=environment)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    for name, (delay, _, _) in WAYS.items():
        said = told[name]
        assert (said["kind"], said["rank"], said["phase"]) == ("straggler", delay.rank, delay.phase), name
        assert said["witness"].startswith("durations")
        assert said["excess_s"] == pytest.approx(LATE_S, rel=0.2), name
        assert said["others_wait_s"] < 1.5 * LATE_S, name  # no time twice; hosts are late as well
        assert said["saves_s"] > 0.7 * LATE_S, name  # on a busy machine hosts are late as well, and hide some of it
