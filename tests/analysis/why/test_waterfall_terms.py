"""The waterfall of steps whose every term was planted."""

import random
from dataclasses import replace
from typing import Any, get_args

import planted as plant
import pytest
from cuda_trace import Trace
from planted import BANDWIDTH, PEAK, STEP, matrices, numbers, planted

from lm_profiler.analysis.trace.packed_trace import PackedTrace
from lm_profiler.analysis.trace.pieces import Piece, Use, traced_work
from lm_profiler.analysis.why.traced import Gap, Traced, broken_down
from lm_profiler.analysis.why.waterfall_terms import Step, contributors, ms, waterfall
from lm_profiler.record.parts import PARTS
from lm_profiler.record.run_record import FlopRate, Rates, Term, Waterfall

US = 1e-6


def rates(bandwidth: float | None = BANDWIDTH, float32: float = PEAK) -> Rates:
    peaks = {"bfloat16": PEAK, "float32": float32}
    flops = [FlopRate(dtype=dtype, flops_per_s=rate, source="round") for dtype, rate in peaks.items()]
    return Rates(flops=flops, bytes_per_s=bandwidth, bytes_source="round")


def measured_step(step_us: float = STEP, **facts: Any) -> Step:
    known: dict[str, Any] = {
        "ci_low": None, "ci_high": None, "input_s": 0.0, "ideal_s": 0.0, "recomputed_share": 0.0,
        "rates": rates(), "dtype": "bfloat16",
    }  # fmt: skip
    return Step(step_s=step_us * US, **{**known, **facts})


def terms_us(fall: Waterfall) -> dict[str, float]:
    """Microseconds."""
    return {term.name: term.seconds / US for term in fall.terms}


def term(fall: Waterfall, name: str) -> Term:
    return next(term for term in fall.terms if term.name == name)


def traced_from(events: list[dict[str, Any]]) -> Traced:
    return broken_down(traced_work(PackedTrace(events)))


@pytest.fixture(scope="module")
def traced() -> Traced:
    return traced_from(planted())


@pytest.fixture(scope="module")
def fall(traced: Traced) -> Waterfall:
    """Two of the ten planted products are repeated, and the clock is 0.8 of the datasheet's."""
    ideal_s = 8 * plant.PRODUCT_US * US
    input_s = (plant.WAIT + plant.COPY) * US
    return waterfall(measured_step(ideal_s=ideal_s, recomputed_share=0.2, clock_share=0.8, input_s=input_s), traced)


def test_planted_terms_are_found_and_add_up(fall: Waterfall) -> None:
    """In the planted trace two of ten products are repeated, and the clock is 0.8 of the datasheet's."""
    ideal = 8 * plant.PRODUCT_US
    clock = ideal / 0.8 - ideal
    products = plant.PRODUCTS * plant.PRODUCT_TOOK
    expected = {
        "ideal": ideal,
        "clock": clock,
        "slow_products": 0.8 * products - ideal - clock,
        "recomputation": 0.2 * products,
        "bandwidth": 2 * plant.ADDED_US,
        "beyond_bandwidth": 2 * plant.ADD_TOOK - plant.HIDDEN - 2 * plant.ADDED_US + plant.REPLAYED,
        "communication": plant.EXPOSED,
        "waiting": 0.0,
        "gaps": plant.LATE,
        "input": plant.WAIT + plant.COPY,
        "unexplained": 0.0,
    }
    assert terms_us(fall) == pytest.approx(expected, abs=0.01)
    assert sum(term.seconds for term in fall.terms) == pytest.approx(fall.step_s, rel=1e-12)
    without_ceiling = ("ideal", "unexplained")
    for term in fall.terms:
        assert term.seconds >= 0
        if term.name in without_ceiling:
            assert term.at_most_s is None
        elif term.name != "waiting":
            assert term.at_most_s == term.seconds
        if term.phases and term.name != "unexplained":
            assert sum(term.phases.values()) == pytest.approx(term.seconds)
        if term.contributors and term.name != "unexplained":
            assert sum(part.seconds for part in term.contributors) == pytest.approx(term.seconds)


def test_equal_steps_have_equal_terms(fall: Waterfall) -> None:
    """The device works off each step while the host is in the next."""
    for term in fall.terms:
        assert term.low_s <= term.seconds <= term.high_s
        assert term.high_s - term.low_s == pytest.approx(0.0, abs=0.01 * US), term.name


ELEMENTWISE_ADD = Piece(0, 1, 0, "memory", "elementwise", "add", "aten::add", None, "forward", 0, None)


@pytest.mark.parametrize(
    "calls_in_two_steps, count, detail",
    [(1, 0.5, "0.5 elementwise kernels"), (2, 1, "1 elementwise kernel"), (23, 11.5, "11.5 elementwise kernels")],
)
def test_operators_that_are_not_in_every_step_count_by_their_share(
    calls_in_two_steps: int, count: float, detail: str
) -> None:
    pieces = [(ELEMENTWISE_ADD, 1000.0)] * calls_in_two_steps
    (part,) = contributors(pieces, 1e-3, 2, "kernels")
    assert part.count == count
    assert part.detail.startswith(detail)


def test_contributors_of_equal_time_keep_their_order() -> None:
    """A division of 3 us, three additions of 1 us: whatever the factor, no rounding error may swap them."""
    division = ELEMENTWISE_ADD._replace(name="div", operator="aten::div")
    rng = random.Random(5)
    for _ in range(100):
        factor = rng.random()
        additions = [(ELEMENTWISE_ADD, 1000 * factor)] * 3
        parts = contributors([(division, 3000 * factor), *additions], 1e-3, 2, "kernels")
        assert [part.what for part in parts] == ["forward: aten::div", "forward: aten::add"]


def test_steps_longer_than_the_traced_ones_are_unexplained(traced: Traced) -> None:
    traced_step_us = plant.BUSY + plant.STRETCHED * (plant.WAIT + plant.LATE)
    input_s = (plant.STRETCHED * plant.WAIT + plant.COPY) * US
    fall = waterfall(measured_step(traced_step_us + 500, input_s=input_s), traced)
    assert terms_us(fall)["unexplained"] == pytest.approx(500)


def test_terms_are_the_same_from_memory_and_from_a_file(traced: Traced) -> None:
    """A file keeps whole nanoseconds: times that are up to 2 % shorter leave nothing unexplained."""
    draw = random.Random(0)
    step = measured_step(STEP, input_s=(plant.WAIT + plant.COPY) * US)
    for _ in range(200):
        pieces = [(piece, length_ns * draw.uniform(0.98, 1.0)) for piece, length_ns in traced.pieces]
        fall = waterfall(step, replace(traced, pieces=pieces))
        assert term(fall, "unexplained").seconds == 0.0


def test_steps_shorter_than_the_traced_ones_are_scaled_down(traced: Traced) -> None:
    """Ceilings are given up to a tenth of a difference."""
    step_us = plant.BUSY - 100
    fall = waterfall(measured_step(step_us), traced)
    us_by_term = terms_us(fall)
    assert us_by_term["gaps"] == pytest.approx(0.0)
    assert us_by_term["input"] == pytest.approx(plant.COPY * step_us / plant.BUSY)
    assert us_by_term["unexplained"] == pytest.approx(0.0)
    assert sum(us_by_term.values()) == pytest.approx(step_us)
    assert "0.1 ms" in fall.notes[0]
    assert term(fall, "communication").at_most_s is not None


def test_a_measured_wait_leaves_the_rest_to_compute() -> None:
    """Of 300 us a wait of 100 was measured, so 200 are left for products, which took 210 and 230 while traced."""
    fall = waterfall(measured_step(300, input_s=100 * US), traced_products(210, 230))
    us_by_term = terms_us(fall)
    assert us_by_term["input"] == pytest.approx(100)
    assert us_by_term["unexplained"] == pytest.approx(0)
    assert us_by_term["ideal"] + us_by_term["slow_products"] == pytest.approx(200)


def test_no_term_exceeds_the_measured_step() -> None:
    """The traced steps may contain a validation."""
    fall = waterfall(measured_step(300), traced_products(600, 620))
    assert sum(terms_us(fall).values()) == pytest.approx(300)
    assert all(0 <= us <= 300 for us in terms_us(fall).values())
    assert all(term.at_most_s is None for term in fall.terms)
    assert len(fall.notes) >= 1


def drawn_waterfall(seed: int, traced: Traced) -> Waterfall:
    """Of a step in which anything may have been seen."""
    draw = random.Random(seed)
    uses = [use for use in get_args(Use) if use != "dispatch"]
    pieces = []
    for piece, _ in draw.choices(traced.pieces, k=draw.randrange(5)):
        drawn_piece = piece._replace(use=draw.choice(uses), phase=draw.choice(PARTS))
        pieces.append((drawn_piece, draw.uniform(1, 900_000)))
    gaps = [Gap(draw.randrange(1, 900_000), draw.choice(PARTS), "x") for _ in range(draw.randrange(4))]
    drawn_trace = Traced(pieces, gaps, steps=draw.choice([1, 3]), on_device=draw.random() < 0.5)
    step = measured_step(
        draw.uniform(50, 3000),
        input_s=draw.choice([0.0, draw.uniform(0, 2e-3)]),
        ideal_s=draw.choice([0.0, draw.uniform(0, 2e-3)]),
        recomputed_share=draw.choice([0.0, draw.random()]),
        clock_share=draw.choice([None, 0.5, 1.2]),
        rates=rates(draw.choice([None, BANDWIDTH])),
        waiting_s={part: draw.uniform(0, 1e-3) for part in PARTS if draw.random() < 0.3},
    )
    return waterfall(step, drawn_trace)


def test_random_traces_have_no_negative_term(traced: Traced) -> None:
    for seed in range(300):
        fall = drawn_waterfall(seed, traced)
        assert sum(term.seconds for term in fall.terms) == pytest.approx(fall.step_s), seed
        for term in fall.terms:
            assert -1e-12 <= term.seconds <= fall.step_s * (1 + 1e-9), seed
            assert all(0.0 <= seconds <= term.seconds * (1 + 1e-9) for seconds in term.phases.values()), seed


@pytest.mark.parametrize(
    "seconds, text", [(3.6, "3,600 ms"), (0.9996, "1,000 ms"), (0.0999, "99.9 ms"), (5e-6, "0.005 ms")]
)
def test_milliseconds_in_words(seconds: float, text: str) -> None:
    assert ms(seconds) == text


def device_that_waits(batch_us: float, loop_us: float) -> Traced:
    """A traced step of a device that waits for the batch, then for the loop, and has nothing else to do."""
    trace = Trace()
    end = batch_us + loop_us
    trace.range("ProfilerStep#1", 0, end)
    if batch_us:
        trace.range("phase: data", 0, batch_us)
    trace.range("phase: forward", batch_us, end)
    return traced_from(trace.events)


@pytest.mark.parametrize(
    "step_us, input_us, traced_batch_us, traced_loop_us, expected_us",
    [
        # measured steps waited for the batch, the traced one did not
        (20, 9, 0, 11, {"gaps": 11, "input": 9, "unexplained": 0}),
        # the traced one waited, measured ones did not
        (11, 0, 9, 11, {"gaps": 11, "input": 0, "unexplained": 0}),
        # nor did these, and nobody saw what took so long
        (20, 0, 9, 11, {"gaps": 11, "input": 0, "unexplained": 9}),
        # both waited
        (20, 9, 9, 11, {"gaps": 11, "input": 9, "unexplained": 0}),
        # both waited, and the trace stretched the waits
        (20, 9, 30, 40, {"gaps": 11, "input": 9, "unexplained": 0}),
        # no term is more than the rest of the step
        (20, 30, 9, 11, {"gaps": 0, "input": 20, "unexplained": 0}),
    ],
)
def test_waits_of_trace_or_step_change_no_other_gap(
    step_us: float, input_us: float, traced_batch_us: float, traced_loop_us: float, expected_us: dict[str, float]
) -> None:
    fall = waterfall(measured_step(step_us, input_s=input_us * US), device_that_waits(traced_batch_us, traced_loop_us))
    found_us = {name: us for name, us in terms_us(fall).items() if name in expected_us}
    assert found_us == pytest.approx(expected_us, abs=1e-9)
    for term in fall.terms[:-1]:
        assert sum(term.phases.values()) == pytest.approx(term.seconds)
        assert sum(part.seconds for part in term.contributors) == pytest.approx(term.seconds)


def test_waiting_for_other_ranks_is_a_term_of_its_own():
    """On a CPU a rank waits where no operator runs: 140 of the 200 us in which backward runs none."""
    trace = Trace()
    trace.range("ProfilerStep#1", 0, 500)
    trace.range("phase: data", 0, 50)
    trace.range("phase: forward", 50, 200)
    trace.operator("aten::mm", 50, 170)
    trace.range("phase: backward", 200, 500)
    trace.operator("aten::mm", 200, 300)
    waiting_s = {"backward": 140 * US, "data": 20 * US}
    fall = waterfall(measured_step(500, input_s=50 * US, waiting_s=waiting_s), traced_from(trace.events))
    us_by_term = terms_us(fall)
    assert us_by_term["waiting"] == pytest.approx(140 + 20)
    assert us_by_term["gaps"] == pytest.approx(60 + 30)
    assert us_by_term["input"] == pytest.approx(50 - 20)
    assert us_by_term["unexplained"] == pytest.approx(0)
    assert term(fall, "waiting").at_most_s is None
    assert term(fall, "waiting").phases == pytest.approx(waiting_s)
    causes_us = {part.what: part.seconds / US for part in term(fall, "gaps").contributors}
    assert causes_us == pytest.approx({"backward: Python": 60, "forward: Python": 30})


def test_on_a_stream_collectives_contain_the_waiting(traced: Traced):
    without_waiting_us = terms_us(waterfall(measured_step(), traced))
    us_by_term = terms_us(waterfall(measured_step(waiting_s={"backward": 150 * US}), traced))
    assert us_by_term["waiting"] == pytest.approx(150)
    assert us_by_term["communication"] == pytest.approx(plant.EXPOSED - 150)
    assert us_by_term["gaps"] == pytest.approx(without_waiting_us["gaps"])


@pytest.mark.parametrize("seed", range(20))
def test_terms_of_known_length_are_found_within_three_percent(seed: int) -> None:
    """As on a CPU: traced operators are up to 2 % off, and tracing makes the waits half as long again.

    A step waits for its batch, then ten times multiplies (at half of the peak), copies (at a quarter of the bandwidth)
    and sleeps.
    """
    rng = random.Random(seed)
    product_us, copy_us, sleep_us, wait_us = (rng.uniform(100, 2000) for _ in range(4))
    side, elements = 256, 100_000
    times = 10
    trace = Trace()
    now = 0.0

    def trace_operator(name: str, length_us: float, arguments: dict[str, Any]) -> None:
        nonlocal now
        end = now + length_us * rng.uniform(0.98, 1.02)
        trace.operator(name, now, end, **arguments)
        now = end

    for number in (1, 2, 3):
        step_begin = now
        trace.range("phase: data", now, now + 1.5 * wait_us)
        now += 1.5 * wait_us
        for _ in range(times):
            trace_operator("aten::mm", product_us, matrices(side, "float"))
            trace_operator("aten::copy_", copy_us, numbers(elements))
            now += 1.5 * sleep_us
        trace.range(f"ProfilerStep#{number}", step_begin, now)

    step_us = wait_us + times * (product_us + copy_us + sleep_us)
    product_flops, copied_bytes = 2 * side**3, 8 * elements
    peaks = rates(bandwidth=4 * copied_bytes / (copy_us * US), float32=2 * product_flops / (product_us * US))
    step = measured_step(
        step_us, rates=peaks, dtype="float32", ideal_s=times * product_us / 2 * US, input_s=wait_us * US
    )
    found_us = terms_us(waterfall(step, traced_from(trace.events)))
    expected_us = dict.fromkeys(found_us, 0.0) | {
        "ideal": times * product_us / 2,
        "slow_products": times * product_us / 2,
        "bandwidth": times * copy_us / 4,
        "beyond_bandwidth": times * copy_us * 3 / 4,
        "gaps": times * sleep_us,
        "input": wait_us,
    }
    assert found_us == pytest.approx(expected_us, abs=0.03 * step_us)


def traced_products(*lengths_us: int) -> Traced:
    """Traced steps of 1000 us each, with nothing but a matrix product of ``lengths_us`` and then a gap."""
    trace = Trace()
    for number, length_us in enumerate(lengths_us):
        begin = 1000 * number
        trace.range(f"ProfilerStep#{number}", begin, begin + 1000)
        trace.range("phase: forward", begin, begin + 1000)
        trace.operator("aten::mm", begin, begin + length_us)
    return traced_from(trace.events)


def test_a_term_has_the_range_of_the_traced_steps() -> None:
    """Of traced steps of 1000 us: what a product does not take is a gap."""
    fall = waterfall(measured_step(1000), traced_products(400, 500, 660))
    assert fall.traced_steps == 3
    products, gaps, moved = (term(fall, name) for name in ("slow_products", "gaps", "bandwidth"))
    mean_us = (400 + 500 + 660) / 3
    assert products.low_s == pytest.approx(400 * US)
    assert products.seconds == pytest.approx(mean_us * US)
    assert products.high_s == pytest.approx(660 * US)
    assert gaps.low_s == pytest.approx((1000 - 660) * US)
    assert gaps.seconds == pytest.approx((1000 - mean_us) * US)
    assert gaps.high_s == pytest.approx((1000 - 400) * US)
    assert (moved.low_s, moved.high_s) == (0.0, 0.0)

    products = term(waterfall(measured_step(1000), traced_products(400)), "slow_products")
    assert (products.low_s, products.high_s) == (None, None)


def test_time_added_by_tracing_shortens_no_other_phase() -> None:
    """Tracing makes backward take 22 ms in place of 10; 40 of forward's 50 ms are a loop of Python."""
    ms_ns = 1_000_000
    in_forward = ELEMENTWISE_ADD
    in_backward = ELEMENTWISE_ADD._replace(phase="backward")
    pieces = [(in_forward, 10.0 * ms_ns), (in_backward, 20.0 * ms_ns)]
    gaps = [Gap(40 * ms_ns, "forward", "Python"), Gap(2 * ms_ns, "backward", "Python")]
    traced = Traced(pieces=pieces, gaps=gaps, steps=1, on_device=False, begins=(0,))
    fall = waterfall(measured_step(60_000, phase_s={"forward": 0.050, "backward": 0.010}), traced)
    assert term(fall, "gaps").phases == pytest.approx({"forward": 0.040})
    assert term(fall, "beyond_bandwidth").phases == pytest.approx({"forward": 0.010, "backward": 0.010})
