"""Rank 0 of several: what its strategy makes of fake tensors, against counts by hand."""

from typing import Any

import pytest
import sharded_plans
from lightning.pytorch.strategies import DDPStrategy
from stored_texts import assert_stored

from lm_profiler.analysis.plan.planned import Planned, planned_floors
from lm_profiler.cli.rehearse import start_rehearsal, wait_for_plan
from lm_profiler.measure.fake.live import Uncounted
from lm_profiler.measure.fake.world import FakeWorld
from lm_profiler.rehearse.strategies import FakeReplica, devices_in, fake_strategy, ring_bytes
from lm_profiler.usage_error import UsageError

DDP = "lightning.pytorch.strategies.DDPStrategy"
FSDP2 = (
    "--trainer.strategy.class_path=lightning.pytorch.strategies.ModelParallelStrategy",
    "--trainer.strategy.init_args.tensor_parallel_size=1",
)
RANKS = 4
LAYER, WHOLE = 4 * sharded_plans.LAYER, 4 * sharded_plans.LAYER * sharded_plans.LAYERS
"""Bytes of a layer's parameters, and of all layers'."""


@pytest.mark.parametrize(
    "given, replicas, has_buckets",
    [
        ({}, None, False),
        ({"strategy": "auto", "devices": 1}, None, False),
        ({"strategy": "auto", "devices": 8}, 8, True),
        ({"strategy": "auto", "devices": "2"}, 2, True),
        ({"strategy": "auto", "devices": [0, 1]}, 2, True),
        ({"strategy": "auto", "devices": "0,1"}, 2, True),
        ({"strategy": "auto", "devices": "auto"}, None, False),
        ({"strategy": "auto", "devices": 1, "num_nodes": 2}, 2, True),
        ({"strategy": "ddp", "devices": 1}, 1, True),
        ({"strategy": "ddp_find_unused_parameters_true"}, 1, True),
        ({"strategy": {"class_path": DDP}}, 1, True),
        ({"strategy": {"class_path": DDP, "init_args": {"gradient_as_bucket_view": True}}}, 1, False),
        ({"strategy": {"class_path": DDP, "dict_kwargs": {"gradient_as_bucket_view": True}}}, 1, False),
    ],
)
def test_ddp_has_replicas_and_buckets(given: dict[str, Any], replicas: int | None, has_buckets: bool) -> None:
    strategy: Any = fake_strategy(given, DDPStrategy, FakeWorld(None), trains=True)
    assert strategy.has_buckets is has_buckets
    assert (strategy.ranks if isinstance(strategy, FakeReplica) else None) == replicas


def test_an_engine_of_its_own_cannot_be_rehearsed() -> None:
    with pytest.raises(Uncounted, match="DeepSpeedStrategy"):
        fake_strategy({"strategy": "deepspeed_stage_2", "devices": 8}, str, FakeWorld(None), trains=True)


def test_sharding_needs_the_number_of_ranks() -> None:
    with pytest.raises(UsageError, match=r"trainer\.devices: .* given auto"):
        fake_strategy({"strategy": "fsdp", "devices": "auto"}, str, FakeWorld(None), trains=True)
    assert devices_in({"devices": 4, "num_nodes": 2}) == 8


@pytest.mark.parametrize(
    "name, sent",
    [
        ("c10d.allreduce_.default", 150),
        ("_c10d_functional.reduce_scatter_tensor.default", 75),
        ("c10d._allgather_base_.default", 75),
        ("c10d.broadcast_.default", 100),
        ("c10d.barrier.default", 0),
    ],
)
def test_bytes_on_a_link_are_those_of_a_ring(name: str, sent: int) -> None:
    assert ring_bytes(name, 100, ranks=4) == sent
    assert ring_bytes(name, 100, ranks=1) == 0


def plan_of_ranks(kind: type, *more: str) -> Planned:
    call = ["fit", f"--model=sharded_plans.{kind.__name__}", "--data=null", "--trainer.max_steps=2"]
    answer = wait_for_plan(start_rehearsal([*call, f"--trainer.devices={RANKS}", *more], gpu=None, fresh=True))
    assert isinstance(answer, Planned), answer
    return answer


def test_fsdp2_gathers_layer_by_layer() -> None:
    plan = plan_of_ranks(sharded_plans.Sharded, *FSDP2, f"--trainer.strategy.init_args.data_parallel_size={RANKS}")
    assert plan.ranks == RANKS
    causes = plan.causes["optimizer"]
    assert (causes.parameters, causes.gradients) == (WHOLE // RANKS, WHOLE // RANKS)
    assert causes.optimizer_states == pytest.approx(2 * WHOLE // RANKS, abs=100)  # and a count of steps each
    # Each layer is gathered before its forward and again before its backward; its gradients are scattered once.
    passed_on = WHOLE * (RANKS - 1) // RANKS
    assert plan.sent == {"forward": passed_on, "backward": 2 * passed_on}
    # One layer whole, or two where the next one is gathered ahead.
    assert LAYER <= plan.gathered <= 2 * LAYER
    # The step takes its temporary tensors of its own shard: no sooner does a DTensor's whole shape count as held.
    assert plan.peaks["optimizer"] < plan.peaks["data"] + 2 * WHOLE // RANKS
    # At the peak no more than two layers are there whole, gathered and as they came from the others.
    assert plan.peaks["forward"] < plan.peaks["data"] + 4 * LAYER + sharded_plans.ACTIVATIONS


def test_zero_1_shares_optimizer_states_alone() -> None:
    """Torch's own class parts them, parameter by parameter."""
    kinds = (sharded_plans.Plain, sharded_plans.ZeroOne)
    whole, shared = (plan_of_ranks(kind, "--trainer.strategy=ddp") for kind in kinds)
    ours, theirs = whole.causes["optimizer"], shared.causes["optimizer"]
    assert (theirs.parameters, theirs.gradients) == (ours.parameters, ours.gradients) == (WHOLE, WHOLE)
    assert ours.optimizer_states == pytest.approx(2 * WHOLE, abs=100)
    assert theirs.optimizer_states == pytest.approx(2 * WHOLE // RANKS, abs=100)
    reduced = 2 * WHOLE * (RANKS - 1) // RANKS
    assert whole.sent == {"backward": reduced}
    assert shared.sent == {"backward": reduced, "optimizer": WHOLE}  # each parameter from its owner to all


def test_our_own_model_shares_optimizer_states_too() -> None:
    small = [f"--model.{name}={n}" for name, n in {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 2}.items()]
    call = ["fit", *small, "--model.shard_optimizer_states=true", f"--trainer.devices={RANKS}", "--trainer.strategy"]
    plan, refused = (
        wait_for_plan(start_rehearsal([*call, "ddp"], gpu=None, fresh=True)),
        wait_for_plan(start_rehearsal([*call, "fsdp2"], gpu=None, fresh=True)),
    )
    assert isinstance(plan, Planned), plan
    causes = plan.causes["optimizer"]
    # Two embeddings of one size are most of the parameters: rank 0 has the states of one of them and no other.
    assert causes.optimizer_states == pytest.approx(2 * 4 * 10_000 * 64, rel=0.05)
    assert refused.is_wrong_call


@pytest.mark.parametrize("strategy, more", [("naive_ddp", 0), ("flat_ddp", 1)])
def test_the_flat_copy_of_the_gradients_is_held_after_backward(strategy: str, more: int) -> None:
    """One sequence of two tokens: what is alive in backward is the model itself, and not its activations."""
    tiny = ("--data.batch_size=1", "--data.context_length=2", "--model.num_layers=1", "--model.vocab_size=50")
    plan = wait_for_plan(
        start_rehearsal(["fit", *tiny, "--trainer.devices=2", f"--trainer.strategy={strategy}"], gpu=None, fresh=True)
    )
    assert isinstance(plan, Planned), plan
    whole = plan.causes["optimizer"].parameters
    assert plan.peaks["backward"] == pytest.approx((4 + more) * whole, rel=0.05)


def test_clipping_by_norm_is_refused_with_an_alternative() -> None:
    call = [
        "fit",
        "--model.num_layers=1",
        "--trainer.devices=2",
        "--trainer.strategy=fsdp",
        "--trainer.precision=bf16-true",
    ]
    refused = wait_for_plan(start_rehearsal([*call, "--trainer.gradient_clip_val=1.0"], gpu=None, fresh=True))
    assert_stored("rehearse/refused: clip", {"by norm": refused.reason})
    by_value = ("--trainer.gradient_clip_val=1.0", "--trainer.gradient_clip_algorithm=value")
    assert isinstance(wait_for_plan(start_rehearsal([*call, *by_value], gpu=None, fresh=True)), Planned)


def test_fsdp_holds_a_share() -> None:
    plan = plan_of_ranks(sharded_plans.Plain, "--trainer.strategy=fsdp")
    causes = plan.causes["optimizer"]
    assert (causes.parameters, causes.gradients) == (WHOLE // RANKS, WHOLE // RANKS)
    assert plan.work["optimizer"].bytes == pytest.approx(7 * WHOLE // RANKS, abs=200)
    seconds = planned_floors(plan, "NVIDIA H200", link_bytes_per_s=1.0).sent_s
    assert seconds == {phase: float(count) for phase, count in plan.sent.items()}
