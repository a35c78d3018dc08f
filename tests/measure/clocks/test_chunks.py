"""Chunks of a tape give what ``TapeReading`` gives for the same marks, however the tape is cut."""

import random

import numpy as np
import pytest
from sleepy_loop import MadeUpDevice

from lm_profiler.measure.clocks import tape as at
from lm_profiler.measure.clocks.tape import ChunkReader, TapeReading
from lm_profiler.measure.clocks.timeline import Timeline

PLAIN = [at.DATA, at.LEAVE, at.TRANSFER, at.LEAVE, at.FORWARD, at.LEAVE, at.BACKWARD, at.LEAVE, at.CLIP, at.LEAVE,
         at.OPTIMIZER, at.OPTIMIZED]  # fmt: skip
NESTED = [at.DATA, at.LEAVE, at.FORWARD, at.BACKWARD, at.LEAVE, at.ZERO_GRAD, at.LEAVE, at.LEAVE]
FAILED = [at.DATA, at.LEAVE, at.FORWARD, at.FAIL, at.LEAVE, at.OTHER, at.LEAVE]
LEFT = [at.DATA, at.LEAVE, at.FORWARD, at.LEAVE, at.OUTSIDE, at.DATA, at.LEAVE]
NONE = [at.LEAVE]
WITHOUT_DATA = PLAIN[2:]


@pytest.mark.parametrize("seed", range(5))
def test_any_tape_cut_anywhere(seed: int) -> None:
    rng = random.Random(seed)
    tape: list[int] = []
    now = 0
    for _ in range(60):
        for code in [*rng.choice([PLAIN, PLAIN, NESTED, FAILED, LEFT, NONE, WITHOUT_DATA]), at.END]:
            now += rng.randrange(1, 1000)
            tape += (code, now)
    timeline = Timeline()
    timeline._tape.extend(tape)
    by_mark = TapeReading()
    for code, instant in zip(tape[::2], tape[1::2], strict=True):
        by_mark.add(code, instant)
    by_step = timeline.reading()
    assert by_step == by_mark
    finished = by_step.finished
    reader, cuts = ChunkReader(), sorted(rng.sample(range(0, len(tape), 2), 7))
    chunks = [reader.read(tape[a:b]) for a, b in zip([0, *cuts], [*cuts, len(tape)], strict=True)]
    begin, end, host_s, seconds = (np.concatenate([getattr(c, name) for c in chunks]) for name in chunks[0]._fields)
    assert begin.tolist() == [step.host_ns[0] for step in finished]
    assert end.tolist() == [step.host_ns[-1] for step in finished]
    np.testing.assert_allclose(host_s, [step.host_seconds() for step in finished], atol=1e-15)
    assert (seconds == host_s).all()


def test_a_step_waits_for_its_device() -> None:
    device = MadeUpDevice()
    timeline = Timeline(device.clock, device)  # type: ignore[arg-type]
    for code in PLAIN:
        timeline.mark(code)
    device.sleep(1.0)
    timeline.mark(at.END)
    reader = ChunkReader(device)  # type: ignore[arg-type]
    assert not len(reader.read(timeline.take_marks()).begin_ns)
    device.wait()
    timed = reader.read(timeline.take_marks())
    assert timed.seconds[0, -1] == pytest.approx(1.0, rel=1e-3)
    assert timed.host_s[0, -1] < 1e-3
