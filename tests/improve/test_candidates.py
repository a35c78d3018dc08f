"""Which changes a run leaves open, what they could save at most, and which cannot work."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.made_parts import made_model
from tests.support.made_runs import made_record
from tests.support.made_waterfall import made_waterfall

from lm_profiler.analysis.remedies.remedy import BY_WORKERS, UNKNOWN, Candidate
from lm_profiler.improve.candidates import open_candidates, refuse_small, requested_candidates
from lm_profiler.record.entry import Entry
from lm_profiler.record.run_record import Settings, TimeSummary

GPU = ("cuda", Settings(half_precision="bf16-mixed", tf32=False, cores=8))
CPU = ("cpu", Settings(cores=1))
OURS: dict[str, Any] = {
    "model": {"class_path": "lm_profiler.training.LanguageModel", "init_args": {
        "compile": False, "compile_mode": None, "attention": "math", "activation_checkpointing": True,
        "fused": False}},
    "data": {"class_path": "lm_profiler.training.FakeTokens", "init_args": {
        "batch_size": 4, "num_workers": 0, "pin_memory": False}},
    "trainer": {"precision": None, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "detect_anomaly": True,
                "benchmark": None},
    "torch": {"compile": False, "compile_mode": None, "float32_matmul_precision": None},
    "loader": {"num_workers": None, "pin_memory": None},
}  # fmt: skip
OTHERS = {
    **OURS,
    "model": {"class_path": "mine.Module", "init_args": {"width": 3}},
    "data": {"class_path": "mine.Data", "init_args": {}},
}
SECONDS = {"data": 0.03, "transfer": 0.01, "forward": 0.2, "backward": 0.4, "clip": 0.02, "optimizer": 0.05}


def entry(config: dict[str, Any], on: tuple[str, Settings] = GPU, **changes: Any) -> Entry:
    record = made_record(config=config)
    machine = {"flags": {"float32_matmul_precision": "highest"}, "device_type": on[0]}
    time = {**record.time, **{name: TimeSummary(n=20, mean=seconds) for name, seconds in SECONDS.items()}}
    facts = {"time": time, "environment": record.environment.model_copy(update=machine), "settings": on[1]}
    return Entry(Path("run"), record.model_copy(update={**facts, **changes}))


def allowed_candidates(look: Entry, free: bool = False) -> list[Candidate]:
    return [candidate for candidate in open_candidates(look, free) if not candidate.refused]


def ceilings_by_name(
    config: dict[str, Any], on: tuple[str, Settings] = GPU, free: bool = False, **changes: Any
) -> dict[str, float | None]:
    return {candidate.name: candidate.ceiling_s for candidate in allowed_candidates(entry(config, on, **changes), free)}


def test_open_options_are_tried_with_the_time_that_they_affect() -> None:
    products_s, all_s = pytest.approx(0.6), pytest.approx(0.04)
    compiled, mode = "model.compile=true", "model.compile_mode"
    batch, accumulation = "data.batch_size", "trainer.accumulate_grad_batches"
    assert ceilings_by_name(OURS, GPU) == {
        "trainer.precision=bf16-mixed": products_s,
        "torch.float32_matmul_precision=high": products_s,
        compiled: products_s,
        f"{compiled} + {mode}=reduce-overhead": products_s,
        f"{compiled} + {mode}=max-autotune": products_s,
        "model.fused=true": 0.05,
        "model.attention=sdpa": products_s,
        "model.activation_checkpointing=false": 0.4,
        f"{batch}=8 + {accumulation}=1": None,
        f"{batch}=2 + {accumulation}=4": None,
        **{f"data.num_workers={count}": 0.03 for count in (1, 2, 4, 8)},
        "data.pin_memory=true": all_s,
        "trainer.detect_anomaly=false": products_s,
        "trainer.benchmark=true": products_s,
    }


def test_compiling_saves_at_most_the_terms_of_the_waterfall_that_it_can() -> None:
    fall = made_waterfall()
    known = {term.name: term.at_most_s or 0.0 for term in fall.terms}
    names = ceilings_by_name(OURS, GPU, waterfall=fall)
    assert names["model.compile=true"] == pytest.approx(
        known["bandwidth"] + known["beyond_bandwidth"] + known["gaps"] + known["unexplained"]
    )


def test_the_verdicts_remedy_goes_first() -> None:
    for bound_by, name in (("host", "model.compile=true"), ("input", "data.num_workers=1")):
        verdict = made_record().verdict.model_copy(update={"bound_by": bound_by})
        assert next(iter(ceilings_by_name(OURS, GPU, verdict=verdict))) == name
    assert "trainer.precision=bf16-mixed" in ceilings_by_name(OURS, ("xpu", Settings()))


def test_checkpointing_is_left_out_by_its_own_option() -> None:
    model = {"class_path": "lm_profiler.training.LanguageModel", "init_args": {**OURS["model"]["init_args"]}}
    model["init_args"] |= {"checkpoint_every": [8, 2], "activation_checkpointing": False}
    names = ceilings_by_name({**OURS, "model": model}, CPU)
    assert names["model.checkpoint_every=null"] == 0.4
    assert not any("activation_checkpointing" in name for name in names)


def test_another_module_has_candidates_of_torch_and_the_loader() -> None:
    names = ceilings_by_name(OTHERS, GPU)
    assert {"torch.compile=true", "torch.float32_matmul_precision=high", "loader.num_workers=2"} < names.keys()
    assert not [name for name in names if name.startswith(("model.", "data."))]


def test_pinned_memory_is_not_pinned_again() -> None:
    pinned = {**OTHERS, "loader": {"num_workers": None, "pin_memory": True}}
    assert "loader.pin_memory=true" in ceilings_by_name(OTHERS, GPU)
    assert "loader.pin_memory=true" not in ceilings_by_name(pinned, GPU)


def test_a_module_that_compiles_itself_is_not_compiled_again() -> None:
    compiled = made_model(compiled=True)
    assert not [name for name in ceilings_by_name(OTHERS, GPU, model=compiled) if "compile" in name]


def test_candidates_that_the_machine_lacks_are_refused() -> None:
    why = {
        candidate.name: candidate.refused for candidate in open_candidates(entry(OURS, CPU), False) if candidate.refused
    }
    lacks = {
        "trainer.precision=bf16-mixed": "half precision",
        "data.num_workers=8": "1 cores",
        "data.pin_memory=true": "device",
    }
    assert why.keys() == lacks.keys()
    for name, word in lacks.items():
        assert word in why[name]


def test_candidates_with_a_small_ceiling_are_refused() -> None:
    more = ceilings_by_name(OURS, GPU, free=True).keys() - ceilings_by_name(OURS, GPU).keys()
    assert more == {"data.batch_size=8", "data.batch_size=16"}
    candidates = refuse_small(allowed_candidates(entry(OURS)), 4.0, 0.01)
    refused = [candidate for candidate in candidates if candidate.refused]
    assert {candidate.name for candidate in refused} == {f"data.num_workers={count}" for count in (1, 2, 4, 8)}
    assert all("1%" in candidate.refused for candidate in refused)
    assert len(candidates) == len(allowed_candidates(entry(OURS)))


def test_values_given_by_the_user_are_tried() -> None:
    ours = allowed_candidates(entry(OURS))
    found = requested_candidates({"data.num_workers": ["0", "2", "3"], "model.width": ["7"]}, ours, entry(OURS).option)
    assert [(candidate.name, candidate.ceiling_s) for candidate in found] == [
        ("data.num_workers=2", 0.03), ("data.num_workers=3", None), ("model.width=7", None)
    ]  # fmt: skip
    assert found[0].group == found[1].group != found[2].group
    assert found[0].may_change == found[1].may_change
    assert found[2].may_change is not None  # so that it is not taken where its numbers cannot be checked
    # What a third kind of attention changes is not known.
    same, other = requested_candidates({"model.attention": ["sdpa", "linear"]}, ours, entry(OURS).option)
    assert same in ours
    assert (other.group, other.may_change) == (same.group, UNKNOWN)


def test_fewer_workers_are_a_known_option() -> None:
    config = {**OURS, "data": {**OURS["data"], "init_args": {**OURS["data"]["init_args"], "num_workers": 8}}}
    own = allowed_candidates(entry(config))
    (fewer,) = requested_candidates({"data.num_workers": ["2"]}, own, entry(config).option)
    assert (fewer.group, fewer.may_change) == ("num_workers", BY_WORKERS)


@pytest.mark.parametrize("on", [GPU, CPU], ids=["GPU", "CPU"])
def test_a_mode_of_compiling_is_tried_compiled_in_the_place_of_the_others(on: tuple[str, Settings]) -> None:
    others = allowed_candidates(entry(OTHERS, on))
    (plain,) = (candidate for candidate in others if candidate.options == {"torch.compile": "true"})
    modes = {"torch.compile_mode": ["max-autotune-no-cudagraphs", "max-autotune"]}

    new, ours = requested_candidates(modes, others, entry(OTHERS).option)
    assert new.options == {"torch.compile": "true", "torch.compile_mode": "max-autotune-no-cudagraphs"}
    assert (new.group, new.may_change) == (ours.group, ours.may_change) == (plain.group, plain.may_change)
    assert (ours in others) == (on is GPU)

    compiled = {**OTHERS, "torch": {**OTHERS["torch"], "compile": True}}
    assert [candidate.options for candidate in requested_candidates(modes, [], entry(compiled).option)] == [
        {"torch.compile_mode": mode} for mode in modes["torch.compile_mode"]
    ]
