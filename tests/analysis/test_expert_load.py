"""The load of experts: what a module reports, what the record has of it, and when it is imbalanced."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from recorded import LEVEL, printed_lines, record_of

from lm_profiler.callbacks.collect import expert_loads
from lm_profiler.models.config import TransformerConfig
from lm_profiler.models.experts import Experts
from lm_profiler.record.run_record import ExpertLoad
from lm_profiler.report.run.run_page import run_page
from lm_profiler.report.tables.formats import render

BALANCED = ExpertLoad.from_tokens(0, [25, 26, 24, 25])
PLANTED = ExpertLoad.from_tokens(3, [10, 70, 12, 8])


def imbalance_notes(*loads: ExpertLoad) -> list[str]:
    notes = record_of(LEVEL, experts=loads).notes
    return [note for note in notes if note.startswith("experts")]


def test_a_planted_imbalance_is_reported() -> None:
    [note] = imbalance_notes(BALANCED, PLANTED)
    assert note == ("experts are imbalanced: in layer 3, expert 1 of 4 gets 70.0% of the tokens (25.0% if balanced)")
    assert imbalance_notes(BALANCED) == []
    assert imbalance_notes() == []
    record = record_of(LEVEL, experts=[BALANCED, PLANTED])
    page = render(run_page(record, Path("logs")), "terminal")
    assert "10.0% 70.0% 12.0% 8.0%" in page
    assert printed_lines(record)["experts:"] == ["the busiest of 4 gets 2.80 x the mean number of tokens (layer 3)"]


def test_layers_without_tokens_are_left_out() -> None:
    module = SimpleNamespace(expert_load=lambda: [[1, 2], [0, 0], [3, 0]])
    assert expert_loads(module) == [ExpertLoad.from_tokens(0, [1, 2]), ExpertLoad.from_tokens(2, [3, 0])]
    assert expert_loads(SimpleNamespace()) == []


@pytest.mark.parametrize("is_planted", [False, True])
def test_a_router_that_favours_an_expert_is_found(is_planted: bool) -> None:
    config = TransformerConfig(d_model=64, d_ff=8, num_layers=1, num_heads=2, num_experts=8, experts_per_token=2)
    torch.manual_seed(0)
    experts = Experts(config)
    x_BTD = torch.randn(4, 256, 64)
    if is_planted:
        x_BTD += 0.5
        torch.nn.init.constant_(experts.router.weight[5], 0.1)
    with torch.no_grad():
        experts(x_BTD)
    [load] = expert_loads(SimpleNamespace(expert_load=lambda: [experts.load_X.tolist()]))
    assert len(imbalance_notes(load)) == is_planted
    assert (load.busiest == 5) or not is_planted
