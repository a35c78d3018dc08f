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
    """A tape holds codes and instants in turns; it is cut at seven places."""
    rng = random.Random(seed)
    codes, instants = [], []
    now = 0
    for _ in range(60):
        for code in [*rng.choice([PLAIN, PLAIN, NESTED, FAILED, LEFT, NONE, WITHOUT_DATA]), at.END]:
            now += rng.randrange(1, 1000)
            codes.append(code)
            instants.append(now)
    by_mark = TapeReading()
    for code, instant in zip(codes, instants, strict=True):
        by_mark.add(code, instant)

    tape = [number for mark in zip(codes, instants, strict=True) for number in mark]
    timeline = Timeline()
    timeline._tape.extend(tape)
    assert timeline.reading() == by_mark

    reader = ChunkReader()
    cuts = sorted(rng.sample(range(0, len(tape), 2), 7))
    chunks = [reader.read(tape[begin:end]) for begin, end in zip([0, *cuts], [*cuts, len(tape)], strict=True)]
    steps = by_mark.finished
    assert np.concatenate([chunk.begin_ns for chunk in chunks]).tolist() == [step.host_ns[0] for step in steps]
    assert np.concatenate([chunk.end_ns for chunk in chunks]).tolist() == [step.host_ns[-1] for step in steps]
    host_s = np.concatenate([chunk.host_s for chunk in chunks])
    np.testing.assert_allclose(host_s, [step.host_seconds() for step in steps], atol=1e-15)
    assert (np.concatenate([chunk.seconds for chunk in chunks]) == host_s).all()


def test_a_step_waits_for_its_device() -> None:
    device = MadeUpDevice()
    timeline = Timeline(device.clock, device)
    for code in PLAIN:
        timeline.mark(code)
    device.sleep(1.0)
    timeline.mark(at.END)
    reader = ChunkReader(device)
    assert not len(reader.read(timeline.take_marks()).begin_ns)
    device.wait()
    timed = reader.read(timeline.take_marks())
    assert timed.seconds[0, -1] == pytest.approx(1.0, rel=1e-3)
    assert timed.host_s[0, -1] < 1e-3
