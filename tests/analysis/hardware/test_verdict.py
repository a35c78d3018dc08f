"""What binds a run is said only with evidence, and nothing is advised that is on already."""

import dataclasses
import itertools

import pytest
from made_ranks import made_ranks

from lm_profiler.analysis.hardware.advice import Settings
from lm_profiler.analysis.hardware.verdict import Evidence, what_binds

BUSY = {"data": 0.001, "transfer": 0.001, "forward": 0.03, "backward": 0.06, "optimizer": 0.008}


def evidence(**changes):
    return dataclasses.replace(Evidence(step_s=0.1, phases_s=BUSY, host_phases_s=BUSY), **changes)


def gpu(**changes):
    return evidence(**{"has_device_stream": True, "host_bound_fraction": 0.02, "utilisation": 0.6, **changes})


def test_a_cpu_run_that_computes():
    found = what_binds(evidence(utilisation=0.65))
    assert found.bound_by == "compute"
    assert found.share == pytest.approx(0.98)
    assert "98%" in found.evidence


def test_a_cpu_that_hardly_computes_is_not_bound_by_compute():
    """Small operators, whose calls cost more than their arithmetic, or a forward pass that sleeps."""
    found = what_binds(evidence(utilisation=0.01, settings=Settings(compiled=False)))
    assert (found.bound_by, found.share) == (None, None)
    assert "1%" in found.evidence
    assert "torch.compile" in found.advice
    assert what_binds(evidence(utilisation=0.2)).bound_by == "compute"


@pytest.mark.parametrize("fraction", [None, 1.0])
def test_host_is_never_claimed_without_a_device(fraction):
    assert what_binds(evidence(host_bound_fraction=fraction, utilisation=0.5)).bound_by == "compute"
    assert what_binds(evidence(host_bound_fraction=fraction, utilisation=0.05)).bound_by is None


@pytest.mark.parametrize("make", [evidence, gpu])
@pytest.mark.parametrize("fraction", [None, 0.0, 1.0])
def test_nothing_is_claimed_of_compute_or_host_where_utilisation_is_unknown(make, fraction):
    found = what_binds(make(utilisation=None, host_bound_fraction=fraction))
    assert (found.bound_by, found.share) == (None, None)
    assert "utilisation is unknown" in found.evidence
    assert "--trace.steps=3" in found.advice
    traced = what_binds(make(utilisation=None, host_bound_fraction=fraction, traced=True))
    assert "in the trace" in traced.advice
    assert "Record" not in traced.advice


def test_a_trace_that_was_asked_for_and_not_recorded_is_not_asked_for_again():
    """The run was interrupted before its last stage."""
    found = what_binds(evidence(utilisation=None, settings=Settings(tracing=True)))
    assert found.advice.startswith("Run it again until its trace is recorded")
    done = what_binds(evidence(utilisation=None, settings=Settings(tracing=True), traced=True))
    assert done.advice.startswith("Look for gaps")


def test_a_batch_that_takes_a_tenth_binds_nothing():
    """Two thirds of this step are forward and backward."""
    phases = {"data": 0.15, "transfer": 0.01, "forward": 0.22, "backward": 0.45, "optimizer": 0.07, "other": 0.1}
    found = what_binds(evidence(step_s=1.0, phases_s=phases, utilisation=0.5))
    assert found.bound_by == "compute"
    found = what_binds(evidence(step_s=1.0, phases_s=phases, utilisation=0.02, settings=Settings(num_workers=0)))
    assert found.bound_by is None
    assert "16% of the step goes to the batch" in found.evidence
    assert "num_workers" in found.advice


@pytest.mark.parametrize("make", [evidence, gpu])
def test_waiting_for_data_is_input(make):
    phases = {"data": 0.04, "forward": 0.02, "backward": 0.04}
    found = what_binds(make(phases_s=phases, settings=Settings(num_workers=0)))
    assert (found.bound_by, found.share) == ("input", pytest.approx(0.4))
    assert "num_workers=2" in found.advice


def test_input_comes_before_host():
    """A device that waits for data has always finished when the next phase is enqueued."""
    found = what_binds(gpu(phases_s={**BUSY, "data": 0.05}, host_bound_fraction=1.0))
    assert found.bound_by == "input"


def test_copying_is_cured_by_pinned_memory_unless_it_is_on():
    phases = {"transfer": 0.04, "forward": 0.02, "backward": 0.04}
    assert "pin_memory=True" in what_binds(gpu(phases_s=phases, settings=Settings(pin_memory=False))).advice
    for pinned in (True, None):
        assert "pin" not in what_binds(gpu(phases_s=phases, settings=Settings(pin_memory=pinned))).advice.lower()


def test_more_workers_than_there_are():
    def advice(**settings):
        phases = {"data": 0.04, "forward": 0.02, "backward": 0.04}
        return what_binds(gpu(phases_s=phases, settings=Settings(**settings))).advice

    assert "from 4 to 8" in advice(num_workers=4)
    assert "from 4 to 8" in advice(num_workers=4, cores=16)
    assert "from 4 to 6" in advice(num_workers=4, cores=6)
    for cores in (2, 1):  # never more than there are cores
        assert "num_workers from" not in advice(num_workers=2, cores=cores)
        assert "as many workers (2) as CPU cores" in advice(num_workers=2, cores=2)
    assert "num_workers=1." in advice(num_workers=0, cores=1)


def test_a_device_that_is_always_done_waits_for_the_host():
    found = what_binds(gpu(host_bound_fraction=0.9, utilisation=0.1, settings=Settings(compiled=False)))
    assert (found.bound_by, found.share) == ("host", None)  # a share of the marks is none of the step
    assert "90% of the phase boundaries" in found.evidence
    assert "torch.compile" in found.advice
    assert what_binds(gpu(host_bound_fraction=0.9, utilisation=0.1, idle_share=0.6)).share == 0.6


@pytest.mark.parametrize(
    "idle_share, utilisation, bound_by",
    [
        (None, 0.85, "compute"),  # each query found it done, and yet it was at work
        (0.6, 0.85, "compute"),  # the profiler slows the host of the traced steps
        (0.1, 0.2, None),  # slow kernels, not a slow host
        (0.1, None, None),
        (None, None, None),
        (0.6, 0.2, "host"),
        (0.6, None, "host"),
    ],
)
def test_marks_alone_do_not_make_a_host_verdict(idle_share, utilisation, bound_by):
    found = what_binds(gpu(host_bound_fraction=0.8, idle_share=idle_share, utilisation=utilisation))
    assert found.bound_by == bound_by


def test_equal_clocks_mean_host_only_on_an_idle_device():
    unknown = {"host_bound_fraction": None}
    assert what_binds(gpu(**unknown, utilisation=0.1)).bound_by == "host"
    assert what_binds(gpu(**unknown, utilisation=None)).bound_by is None
    assert what_binds(gpu(**unknown, utilisation=0.7)).bound_by == "compute"  # it synchronizes each step
    short = {phase: t / 10 for phase, t in BUSY.items()}
    assert what_binds(gpu(**unknown, utilisation=0.1, host_phases_s=short)).bound_by is None


def test_what_the_trace_can_tell():
    assert what_binds(gpu(communication_share=0.3)).bound_by == "communication"
    assert what_binds(gpu(memory_bound_share=0.7)).bound_by == "memory bandwidth"
    assert what_binds(gpu(memory_bound_share=0.2, communication_share=0.05)).bound_by == "compute"


def test_a_busy_device_far_from_its_ceiling_is_unknown():
    found = what_binds(gpu(utilisation=0.15))
    assert (found.bound_by, found.share) == (None, None)
    assert "15%" in found.evidence
    found = what_binds(gpu(utilisation=None, host_phases_s={}))
    assert found.bound_by is None
    assert "trace" in found.advice


def test_time_outside_the_phases_is_not_called_compute():
    found = what_binds(evidence(phases_s={"forward": 0.02, "backward": 0.03}))
    assert found.bound_by is None
    assert "50%" in found.evidence


def test_of_an_evaluation_no_backward_pass_is_spoken_of():
    said = what_binds(evidence(phases_s={"data": 0.02, "forward": 0.07}, utilisation=None)).evidence
    assert "70% of the step is forward" in said
    assert "backward" not in said
    assert "optimizer" not in said


def test_a_heavy_optimizer():
    phases = {"forward": 0.02, "backward": 0.03, "optimizer": 0.05}
    assert "fused=True" in what_binds(evidence(phases_s=phases, settings=Settings(fused_optimizer=False))).advice
    assert "Accumulate" in what_binds(evidence(phases_s=phases, settings=Settings(fused_optimizer=True))).advice


def test_precision_is_advised_on_a_gpu_and_not_on_a_cpu():
    full = Settings(precision="32-true", compiled=False, half_precision="bf16-mixed")
    assert "bf16-mixed" in what_binds(gpu(settings=full)).advice
    older = dataclasses.replace(full, half_precision="16-mixed")
    assert "precision 16-mixed" in what_binds(gpu(settings=older)).advice
    for binds in ({}, {"memory_bound_share": 0.9}, {"utilisation": 0.1}):  # a card without, or one that nobody knows
        settings = Settings(precision="32-true", compiled=True)
        assert "16-mixed" not in what_binds(gpu(settings=settings, **binds)).advice
    assert "TF32" not in what_binds(gpu(settings=full)).advice  # unknown: it may be on, or not exist
    assert "TF32" in what_binds(gpu(settings=Settings(precision="32-true", tf32=False))).advice
    assert "bf16" not in what_binds(evidence(settings=full)).advice
    assert "bf16" not in what_binds(gpu(settings=Settings(precision="bf16-mixed"))).advice


def test_full_memory_turns_to_checkpointing():
    settings = Settings(compiled=True, memory_free_share=0.02, checkpointing=False, tokens_per_batch=2048)
    found = what_binds(gpu(utilisation=0.5, settings=settings))
    assert "checkpointing" in found.advice
    assert "2048 tokens" in found.advice


REMEDIES = {
    "compiled": "try torch.compile",
    "fused_optimizer": "fused optimizer",
    "pin_memory": "pin the batches",
    "checkpointing": "try activation checkpointing",
}
CASES = [
    *({"utilisation": u, "host_bound_fraction": h} for u, h in itertools.product([0.1, 0.5, 0.9], [0.0, 1.0])),
    {"memory_bound_share": 0.9},
    {"communication_share": 0.5},
    {"phases_s": {"forward": 0.03, "data": 0.05}},
    {"phases_s": {"forward": 0.03, "transfer": 0.05}},
    {"utilisation": None},
    {"host_bound_fraction": 0.9, "utilisation": None, "idle_share": 0.9},
    {"phases_s": {"forward": 0.02, "optimizer": 0.07}},
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("free", [None, 0.01, 0.8])
def test_nothing_is_advised_that_is_on_already_or_may_be(case, free):
    for state in (True, None):
        states = dict.fromkeys(REMEDIES, state)
        settings = Settings(precision="bf16-mixed", tf32=True, memory_free_share=free, **states)
        advice = what_binds(gpu(settings=settings, **case)).advice
        assert advice.endswith(".")
        for text in (*REMEDIES.values(), "bf16-mixed", "TF32"):
            assert text.lower() not in advice.lower()


def test_ranks_that_wait_for_one_of_them_are_asked_for_before_the_input():
    """Rank 1's loader is slow: the others' data is not, but they wait."""
    ranks = made_ranks(world=2, slow=1, excess_ms=30.0)
    waiting = BUSY | {"data": 0.05}
    found = what_binds(evidence(phases_s=waiting, utilisation=0.5, ranks=ranks))
    assert found.bound_by == "straggler"
    assert found.share == pytest.approx(ranks.finding.saves_s / ranks.step_s)
    assert found.evidence == ranks.finding.evidence
    assert "rank 1" in found.advice
    assert "disk" in found.advice
    assert what_binds(evidence(phases_s=waiting, utilisation=0.5)).bound_by == "input"


def test_a_straggler_whose_mending_saves_little_binds_nothing():
    ranks = made_ranks(world=2, slow=1, excess_ms=3.0)
    assert what_binds(evidence(utilisation=0.5, ranks=ranks)).bound_by == "compute"
    equal = made_ranks(world=2, slow=None)
    assert what_binds(evidence(utilisation=0.5, ranks=equal)).bound_by == "compute"


def test_ranks_that_are_slow_in_turns_are_told_what_evens_them():
    ranks = made_ranks(world=2, slow=1, excess_ms=30.0)
    turns = ranks.finding.model_copy(update={"kind": "turns", "rank": None, "phase": "forward"})
    found = what_binds(evidence(utilisation=0.5, ranks=ranks.model_copy(update={"finding": turns})))
    assert found.bound_by == "straggler"
    assert "like length" in found.advice
