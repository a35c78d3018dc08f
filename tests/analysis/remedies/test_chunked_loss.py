"""The chunked loss as a setting that needs less: offered where it has less in memory, and where it is not on."""

from __future__ import annotations

import pytest

from lm_profiler.analysis.plan.planned import Planned
from lm_profiler.analysis.remedies.catalogue import combined_remedies, remedies

CHUNKED = {"model.loss": "chunked"}


def planned(loss: str | None, batch: int, context: int) -> Planned:
    settings = {} if loss is None else {"model.loss": loss}
    return Planned(peaks={}, causes={}, batch=batch, context=context, settings=settings)


@pytest.mark.parametrize(
    "loss, batch, context, is_offered",
    [
        ("plain", 4, 512, True),
        ("plain", 2, 512, False),  # a single chunk has all logits
        ("chunked", 4, 512, False),
        (None, 4, 512, False),  # a module of the user's
    ],
)
def test_it_is_offered_for_more_than_a_chunk_of_tokens(
    loss: str | None, batch: int, context: int, is_offered: bool
) -> None:
    settings = [dict(setting.options) for setting in remedies(planned(loss, batch, context))]
    assert (CHUNKED in settings) == is_offered
    combined = [setting.options for setting in combined_remedies(planned(loss, batch, context))]
    assert all((options.get("model.loss") == "chunked") == is_offered for options in combined)
