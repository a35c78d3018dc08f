"""What the reader of memory reads between stages."""

import psutil
import pytest
import torch
from fake_device import Clock

from lm_profiler.callbacks.instruments import memory
from lm_profiler.callbacks.instruments.memory import MemoryReader
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.memory.peaks import ProcessProbe


@pytest.mark.parametrize("stage, is_read", [("warmup", False), ("measure", True)])
def test_free_memory_is_read_after_the_measured_steps(
    stage: str, is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit leaves less than the machine has."""
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2**30)
    model = torch.nn.Linear(1, 1)
    reader = MemoryReader(ProcessProbe(), Timeline(Clock()), torch.device("cpu"), lambda: (model, []))
    reader.begin(stage)
    reader.end(stage)
    assert reader.facts.get("available_bytes") == (2**30 if is_read else None)
    if is_read:
        resident_bytes = psutil.Process().memory_info().rss
        assert reader.facts["resident_bytes"] == pytest.approx(resident_bytes, rel=0.2)
