"""Every way to divide training among processes leads to the parameters of one process on the joined batch."""

from functools import partial
from typing import Any

import pytest
import torch
from kept import assert_true
from tests.support import ways_to_average
from tests.support.ways_to_average import WAYS, batches, train_in_every_way, trained
from torch import Tensor

from lm_profiler.cli.main import main
from lm_profiler.processes.rank_group import rank_messages
from lm_profiler.training import WrappedDDP

WRAPPED, WRAPPER = "--trainer.strategy=WrappedDDP", "--trainer.strategy.wrapper"
CASTING = "tests.support.ways_to_average:CastingDDP"


@pytest.fixture(scope="module")
def divided() -> dict[str, Any]:
    """What the ranks sent: parameters by way, and by rank what they logged."""
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store  # it has found a free port
    return dict(rank_messages(partial(train_in_every_way, port=port), ways_to_average.RANKS))


@pytest.fixture(scope="module")
def joined() -> dict[str, dict[str, Tensor]]:
    """By precision, which also decides on the parameters that training begins with."""
    return {precision: trained(batches().flatten(1, 2), "auto", precision) for precision in ("64-true", "32-true")}


@pytest.mark.parametrize("way", WAYS)
def test_parameters_are_those_of_one_process(way: str, divided: dict[str, Any], joined: dict[str, dict[str, Tensor]]):
    precision = WAYS[way][1]
    tolerance = 1e-10 if precision == "64-true" else 2e-4  # AdamW divides small gradients by their own size
    assert divided[way].keys() == joined[precision].keys()
    for name, expected in joined[precision].items():
        result = torch.tensor(divided[way][name], dtype=expected.dtype)
        torch.testing.assert_close(result, expected, rtol=0, atol=tolerance)


def test_two_ranks_log_the_mean_of_both(divided: dict[str, Any]) -> None:
    (logged, mine), (also, theirs) = (divided[f"metrics of {rank}"] for rank in (0, 1))
    assert logged == also
    assert mine != theirs
    assert_true(logged, [one + other for one, other in zip(mine, theirs, strict=True)])


@pytest.mark.parametrize("dtype_name", ["bfloat16", "torch.bfloat16"])
def test_a_wrapper_gets_its_options_with_a_dtype_for_its_name(dtype_name: str) -> None:
    layer, x = torch.nn.Linear(3, 2), torch.ones(1, 3)
    strategy = WrappedDDP(CASTING, wrapper_options={"compute_dtype": dtype_name})
    strategy.model = layer
    strategy.configure_ddp()
    expected = torch.nn.functional.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())
    assert torch.equal(strategy.model(x), expected)


@pytest.mark.usefixtures("no_preflight")
@pytest.mark.parametrize(
    "options, subject",
    [
        ([WRAPPED, f"{WRAPPER}=tests.support.ways_to_average:NoWrapper"], "wrapper"),
        ([WRAPPED, f"{WRAPPER}=tests.support.nowhere:DDP"], "wrapper"),
        ([WRAPPED, f"{WRAPPER}={CASTING}", f"{WRAPPER}_options.bits=16"], "wrapper_options"),
        (["--trainer.strategy=fsdp2", "--model.shard_optimizer_states=true"], "model.shard_optimizer_states"),
        (["--model.shard_optimizer_states=true", "--trainer.devices=1"], "model.shard_optimizer_states"),
    ],
)
def test_wrong_wrappers_are_refused(options: list[str], subject: str, capfd: pytest.CaptureFixture[str]):
    assert main(["fit", "--config=demo", "--trainer.accelerator=cpu", "--trainer.devices=2", *options]) == 2
    assert capfd.readouterr().err.startswith(f"lm_profiler: {subject}: ")
