"""The rows of ranks whose files another node cannot see are named, with the host to look on."""

from __future__ import annotations

from pathlib import Path

from lm_profiler.callbacks.outcome.folder import without_steps
from lm_profiler.record.step_files import begin_rows


def test_of_nodes_without_a_common_folder_the_ranks_are_named_by_host(tmp_path: Path) -> None:
    begin_rows(tmp_path, 3)  # on this node, and ended before its first step
    hosts = {3: "a", **dict.fromkeys(range(8, 16), "b"), 16: None}
    there = f": what they left is not to be seen from here, but in {tmp_path} on their own host"
    assert without_steps([3, *range(8, 17)], tmp_path, hosts.get) == [
        "no steps of rank 3 (a)",
        f"no steps of ranks 8–15 (b){there}",
        f"no steps of rank 16{there}",
    ]
