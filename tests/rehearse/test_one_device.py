"""What of several devices a rehearsal on one takes over."""

from __future__ import annotations

from typing import Any

import pytest

from lm_profiler.rehearse.one_device import SplitOverDevices, has_buckets

DDP = "lightning.pytorch.strategies.DDPStrategy"


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, False),
        ({"strategy": "auto", "devices": 1}, False),
        ({"strategy": "auto", "devices": 8}, True),
        ({"strategy": "auto", "devices": "2"}, True),
        ({"strategy": "auto", "devices": [0, 1]}, True),
        ({"strategy": "auto", "devices": "0,1"}, True),
        ({"strategy": "auto", "devices": "auto"}, False),
        ({"strategy": "auto", "devices": 1, "num_nodes": 2}, True),
        ({"strategy": "ddp", "devices": 1}, True),
        ({"strategy": "ddp_find_unused_parameters_true"}, True),
        ({"strategy": {"class_path": DDP}}, True),
        ({"strategy": {"class_path": DDP, "init_args": {"gradient_as_bucket_view": True}}}, False),
        ({"strategy": {"class_path": DDP, "dict_kwargs": {"gradient_as_bucket_view": True}}}, False),
    ],
)
def test_ddp_has_buckets(given: dict[str, Any], expected: bool) -> None:
    assert has_buckets(given) is expected


@pytest.mark.parametrize(
    "strategy", ["fsdp", "deepspeed_stage_2", {"class_path": "lightning.pytorch.strategies.ModelParallelStrategy"}]
)
def test_what_is_split_over_devices_is_not_one_of_them(strategy: Any) -> None:
    with pytest.raises(SplitOverDevices, match="the module is split over devices"):
        has_buckets({"strategy": strategy, "devices": 8})
