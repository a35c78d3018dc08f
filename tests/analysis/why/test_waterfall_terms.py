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


def step(step_us: float = STEP, **facts: Any) -> Step:
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


@pytest.fixture(scope="module")
def traced() -> Traced:
    return broken_down(traced_work(PackedTrace(planted())))


@pytest.fixture(scope="module")
def fall(traced: Traced) -> Waterfall:
    """Two of ten products are repeated, and the clock is 0.8 of the sheet's."""
    ideal_s = 8 * plant.PRODUCT_US * US
    input_s = (plant.WAIT + plant.COPY) * US
    return waterfall(step(ideal_s=ideal_s, recomputed_share=0.2, clock_share=0.8, input_s=input_s), traced)


def test_planted_terms_are_found_and_add_up(fall: Waterfall) -> None:
    ideal, products = 8 * plant.PRODUCT_US, plant.PRODUCTS * plant.PRODUCT_TOOK
    clock = 0.25 * ideal
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
    assert all(term.seconds >= 0 for term in fall.terms)
    assert [term.at_most_s for term in fall.terms if term.name in ("ideal", "unexplained")] == [None, None]
    assert all(term.at_most_s == term.seconds for term in fall.terms[1:-1] if term.name != "waiting")
    for each in fall.terms[:-1]:
        if each.phases:
            assert sum(each.phases.values()) == pytest.approx(each.seconds)
        if each.contributors:
            assert sum(part.seconds for part in each.contributors) == pytest.approx(each.seconds)


def test_equal_steps_have_equal_terms(fall: Waterfall) -> None:
    """The device works off each step while the host is in the next."""
    for each in fall.terms:
        assert each.low_s <= each.seconds <= each.high_s
        assert each.high_s - each.low_s == pytest.approx(0.0, abs=0.01 * US), each.name


@pytest.mark.parametrize("calls, text", [(1, "0.5 elementwise kernels"), (2, "1 elementwise kernel"), (23, "11.5 ele")])
def test_operators_that_are_not_in_every_step_count_by_their_share(calls: int, text: str) -> None:
    piece = Piece(0, 1, 0, "memory", "elementwise", "add", "aten::add", None, "forward", 0, None)
    (part,) = contributors([(piece, 1000.0)] * calls, 1e-3, 2, "kernels")
    assert part.count == calls / 2
    assert part.detail.startswith(text)


def test_contributors_of_equal_time_keep_their_order() -> None:
    """Three times 1 us and once 3 us: their sums differ in the last digits with the factor."""
    thrice = Piece(0, 1, 0, "memory", "elementwise", "add", "aten::add", None, "forward", 0, None)
    once = thrice._replace(name="div", operator="aten::div")
    rng = random.Random(5)
    for _ in range(100):
        factor = rng.random()
        weighed = [(once, 3000 * factor), *[(thrice, 1000 * factor)] * 3]
        assert [part.what for part in contributors(weighed, 1e-3, 2, "kernels")] == [
            "forward: aten::div",
            "forward: aten::add",
        ]


def test_steps_longer_than_the_traced_ones_are_unexplained(traced: Traced) -> None:
    seen = plant.BUSY + plant.STRETCHED * (plant.WAIT + plant.LATE)
    input_s = (plant.STRETCHED * plant.WAIT + plant.COPY) * US
    assert terms_us(waterfall(step(seen + 500, input_s=input_s), traced))["unexplained"] == pytest.approx(500)


def test_terms_are_the_same_from_memory_and_from_a_file(traced: Traced) -> None:
    """A file keeps whole nanoseconds."""
    draw, left = random.Random(0), []
    for _ in range(200):
        pieces = [(piece, own * draw.uniform(0.98, 1.0)) for piece, own in traced.pieces]
        ended = step(STEP, input_s=(plant.WAIT + plant.COPY) * US)
        left.append(term(waterfall(ended, replace(traced, pieces=pieces)), "unexplained"))
    assert {one.seconds for one in left} == {0.0}


def test_steps_shorter_than_the_traced_ones_are_scaled_down(traced: Traced) -> None:
    """Ceilings are given up to a tenth of a difference."""
    fall, share = waterfall(step(plant.BUSY - 100), traced), 1.0 - 100 / plant.BUSY
    us_by_term = terms_us(fall)
    assert (us_by_term["gaps"], us_by_term["input"], us_by_term["unexplained"]) == pytest.approx(
        (0.0, plant.COPY * share, 0.0)
    )
    assert sum(us_by_term.values()) == pytest.approx(plant.BUSY - 100)
    assert "0.1 ms" in fall.notes[0]
    assert term(fall, "communication").at_most_s is not None


def test_a_measured_wait_leaves_the_rest_to_compute() -> None:
    """Of 300 a wait of 100 was measured, so 200 are left to compute, which took 220 while traced."""
    fall = waterfall(step(300, input_s=100 * US), broken_down(traced_work(PackedTrace(steps_of_products(210, 230)))))
    us_by_term = terms_us(fall)
    assert (us_by_term["input"], us_by_term["unexplained"]) == pytest.approx((100, 0))
    assert us_by_term["ideal"] + us_by_term["slow_products"] == pytest.approx(200)


def test_no_term_exceeds_the_measured_step() -> None:
    """The traced steps may contain a validation."""
    fall = waterfall(step(300), broken_down(traced_work(PackedTrace(steps_of_products(600, 620)))))
    assert sum(terms_us(fall).values()) == pytest.approx(300)
    assert all(0 <= us <= 300 for us in terms_us(fall).values())
    assert {each.at_most_s for each in fall.terms} == {None}
    assert len(fall.notes) >= 1


def drawn_waterfall(seed: int, traced: Traced) -> Waterfall:
    """Of a step in which anything may have been seen."""
    draw = random.Random(seed)
    uses = [of for of in get_args(Use) if of != "dispatch"]
    kept = [piece for piece, _ in draw.choices(traced.pieces, k=4)]
    drawn = [piece._replace(use=draw.choice(uses), phase=draw.choice(PARTS)) for piece in kept[: draw.randrange(5)]]
    gaps = [Gap(draw.randrange(1, 900_000), draw.choice(PARTS), "x") for _ in range(draw.randrange(4))]
    took = [(piece, draw.uniform(1, 900_000)) for piece in drawn]
    seen = Traced(took, gaps, draw.choice([1, 3]), draw.random() < 0.5)
    facts = {
        "input_s": draw.choice([0.0, draw.uniform(0, 2e-3)]), "ideal_s": draw.choice([0.0, draw.uniform(0, 2e-3)]),
        "recomputed_share": draw.choice([0.0, draw.random()]), "clock_share": draw.choice([None, 0.5, 1.2]),
        "rates": rates(draw.choice([None, BANDWIDTH])),
        "waiting_s": {part: draw.uniform(0, 1e-3) for part in PARTS if draw.random() < 0.3},
    }  # fmt: skip
    return waterfall(step(draw.uniform(50, 3000), **facts), seen)


def test_random_traces_have_no_negative_term(traced: Traced) -> None:
    for seed in range(300):
        fall = drawn_waterfall(seed, traced)
        assert sum(each.seconds for each in fall.terms) == pytest.approx(fall.step_s), seed
        assert all(-1e-12 <= each.seconds <= fall.step_s * (1 + 1e-9) for each in fall.terms), seed
        for each in fall.terms:
            assert all(0.0 <= seconds <= each.seconds * (1 + 1e-9) for seconds in each.phases.values()), seed


@pytest.mark.parametrize(
    "seconds, text", [(3.6, "3,600 ms"), (0.9996, "1,000 ms"), (0.0999, "99.9 ms"), (5e-6, "0.005 ms")]
)
def test_milliseconds_in_words(seconds: float, text: str) -> None:
    assert ms(seconds) == text


def device_that_waits(waited: float, late: float) -> Traced:
    """A traced step of a device that waits for the batch, then for the loop, and has nothing else to do."""
    trace = Trace()
    trace.range("ProfilerStep#1", 0, waited + late)
    if waited:
        trace.range("phase: data", 0, waited)
    trace.range("phase: forward", waited, waited + late)
    return broken_down(traced_work(PackedTrace(trace.events)))


@pytest.mark.parametrize(
    "step_us, input_us, seen, expected",
    [
        (20, 9, (0, 11), (11, 9, 0)),  # measured steps waited, the traced did not
        (11, 0, (9, 11), (11, 0, 0)),  # the traced waited, measured ones did not
        (20, 0, (9, 11), (11, 0, 9)),  # nor did these, and nobody saw what took so long
        (20, 9, (9, 11), (11, 9, 0)),  # both
        (20, 9, (30, 40), (11, 9, 0)),  # both, and the trace stretched them
        (20, 30, (9, 11), (0, 20, 0)),  # no term is more than the rest of the step
    ],
)
def test_waits_of_trace_or_step_change_no_other_gap(
    step_us: float, input_us: float, seen: tuple[float, float], expected: tuple[float, float, float]
) -> None:
    fall = waterfall(step(step_us, input_s=input_us * US), device_that_waits(*seen))
    us_by_term = terms_us(fall)
    assert (us_by_term["gaps"], us_by_term["input"], us_by_term["unexplained"]) == pytest.approx(expected, abs=1e-9)
    for each in fall.terms[:-1]:
        assert sum(each.phases.values()) == pytest.approx(each.seconds)
        assert sum(part.seconds for part in each.contributors) == pytest.approx(each.seconds)


def test_waiting_for_other_ranks_is_a_term_of_its_own():
    """On the CPU it is where no operator ran: 60 of the 200 of Python in backward are its own."""
    trace = Trace()
    trace.range("ProfilerStep#1", 0, 500)
    trace.range("phase: data", 0, 50)
    trace.range("phase: forward", 50, 200)
    trace.operator("aten::mm", 50, 170)
    trace.range("phase: backward", 200, 500)
    trace.operator("aten::mm", 200, 300)
    waits = {"backward": 140 * US, "data": 20 * US}
    fall = waterfall(step(500, input_s=50 * US, waiting_s=waits), broken_down(traced_work(PackedTrace(trace.events))))
    us_by_term = terms_us(fall)
    assert [us_by_term[name] for name in ("waiting", "gaps", "input", "unexplained")] == pytest.approx([160, 90, 30, 0])
    assert term(fall, "waiting").at_most_s is None
    assert term(fall, "waiting").phases == pytest.approx(waits)
    causes = {part.what: part.seconds / US for part in term(fall, "gaps").contributors}
    assert causes == pytest.approx({"backward: Python": 60, "forward: Python": 30})


def test_on_a_stream_collectives_contain_the_waiting(traced: Traced):
    fall = waterfall(step(waiting_s={"backward": 150 * US}), traced)
    us_by_term = terms_us(fall)
    assert (us_by_term["waiting"], us_by_term["communication"]) == pytest.approx((150, plant.EXPOSED - 150))
    assert us_by_term["gaps"] == pytest.approx(terms_us(waterfall(step(), traced))["gaps"])


@pytest.mark.parametrize("seed", range(20))
def test_terms_of_known_length_are_found_within_three_percent(seed: int) -> None:
    """As on a CPU: traced operators are up to 2 % off, and tracing makes the sleeps half as long again."""
    rng = random.Random(seed)
    product, copy, slept, waited = (rng.uniform(100, 2000) for _ in range(4))
    times, steps, at, trace = 10, 3, 0.0, Trace()
    side, elements = 256, 100_000
    for number in range(1, steps + 1):
        began = at
        trace.range("phase: data", at, at + 1.5 * waited)
        at += 1.5 * waited
        for _ in range(times):
            for name, length, given in (
                ("aten::mm", product, matrices(side, "float")),
                ("aten::copy_", copy, numbers(elements)),
            ):
                end = at + length * rng.uniform(0.98, 1.02)
                trace.operator(name, at, end, **given)
                at = end
            at += 1.5 * slept
        trace.range(f"ProfilerStep#{number}", began, at)
    step_us = waited + times * (product + copy + slept)
    # At half of the peak, and at a quarter of the bandwidth.
    known = rates(bandwidth=4 * 8 * elements / (copy * US), float32=2 * 2 * side**3 / (product * US))
    ideal_s, input_s = times * product / 2 * US, waited * US
    fall = waterfall(
        step(step_us, rates=known, dtype="float32", ideal_s=ideal_s, input_s=input_s),
        broken_down(traced_work(PackedTrace(trace.events))),
    )
    expected = dict.fromkeys(terms_us(fall), 0.0) | {
        "ideal": times * product / 2,
        "slow_products": times * product / 2,
        "bandwidth": times * copy / 4,
        "beyond_bandwidth": times * copy * 3 / 4,
        "gaps": times * slept,
        "input": waited,
    }
    assert terms_us(fall) == pytest.approx(expected, abs=0.03 * step_us)
    assert abs(terms_us(fall)["unexplained"]) < 0.03 * step_us


def steps_of_products(*took: int) -> list[dict[str, Any]]:
    """Steps of 1000 microseconds, in each a product that ``took`` so long."""
    trace = Trace()
    for number, us in enumerate(took):
        begin = 1000 * number
        trace.range(f"ProfilerStep#{number}", begin, begin + 1000)
        trace.range("phase: forward", begin, begin + 1000)
        trace.operator("aten::mm", begin, begin + us)
    return trace.events


def test_a_term_has_the_range_of_the_traced_steps() -> None:
    fall = waterfall(step(1000), broken_down(traced_work(PackedTrace(steps_of_products(400, 500, 660)))))
    assert fall.traced_steps == 3
    slow, gaps, moved = (term(fall, name) for name in ("slow_products", "gaps", "bandwidth"))
    assert [of / US for of in (slow.low_s, slow.seconds, slow.high_s)] == pytest.approx([400, 520, 660])
    assert [of / US for of in (gaps.low_s, gaps.seconds, gaps.high_s)] == pytest.approx([340, 480, 600])
    assert (moved.low_s, moved.high_s) == (0.0, 0.0)
    slow = term(waterfall(step(1000), broken_down(traced_work(PackedTrace(steps_of_products(400))))), "slow_products")
    assert (slow.low_s, slow.high_s) == (None, None)


def test_time_added_by_tracing_shortens_no_other_phase() -> None:
    """Backward's operators take 20 of 10 ms while traced; a loop of Python takes 40 ms of forward's 50."""
    ms_ns = 1_000_000

    def operator(phase: str) -> Piece:
        return Piece(0, 1, 0, "memory", "add", "add", "aten::add", None, phase, 0, None)

    pieces = [(operator("forward"), 10.0 * ms_ns), (operator("backward"), 20.0 * ms_ns)]
    gaps = [Gap(40 * ms_ns, "forward", "Python"), Gap(2 * ms_ns, "backward", "Python")]
    traced = Traced(pieces=pieces, gaps=gaps, steps=1, on_device=False, begins=(0,))
    fall = waterfall(step(60_000, phase_s={"forward": 0.050, "backward": 0.010}), traced)
    assert term(fall, "gaps").phases == pytest.approx({"forward": 0.040})
    assert term(fall, "beyond_bandwidth").phases == pytest.approx({"forward": 0.010, "backward": 0.010})
