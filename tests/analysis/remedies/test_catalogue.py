"""The catalogue answers every finding, and offers a run that does not fit other settings."""

from typing import Any, get_args

import pytest
from tests.support.made_runs import made_record

from lm_profiler.analysis.plan.planned import Planned
from lm_profiler.analysis.remedies.catalogue import REMEDIES, combined_remedies, likely_share, remedies, remedy_of
from lm_profiler.record.run_record import Finding, FindingName


def planned(largest: int | None = None, batch: int = 12, **settings: Any) -> Planned:
    return Planned({"forward": 100}, {}, batch, 512, largest, settings=settings)


OURS = {
    "trainer.precision": "32-true",
    "trainer.accumulate_grad_batches": 2,
    "data.batch_size": 12,
    "data.context_length": 512,
    "model.attention": "math",
    "model.activation_checkpointing": False,
    "model.optimizer": "adamw",
}


def test_our_models_have_a_remedy_for_each_setting() -> None:
    assert [[*way.words] for way in remedies(planned(largest=5, **OURS), largest_context=256)] == [
        ["--model.activation_checkpointing=true"],
        ["--model.attention=sdpa"],
        ["--data.batch_size=4", "--trainer.accumulate_grad_batches=6"],  # the same 24 samples a step
        ["--data.batch_size=3", "--trainer.accumulate_grad_batches=8"],
        ["--trainer.precision=bf16-mixed"],
        ["--trainer.precision=bf16-true"],
        ["--data.batch_size=5"],
        ["--model.optimizer=sgd"],
        ["--data.context_length=256"],
    ]


def test_a_setting_that_is_already_on_is_no_remedy() -> None:
    sparse = OURS | {
        "trainer.precision": "bf16-true",
        "model.attention": "sdpa",
        "model.activation_checkpointing": True,
        "model.optimizer": "sgd",
    }
    assert remedies(planned(largest=0, **sparse), largest_context=0) == []
    assert remedies(planned(**{"trainer.precision": "64-true"})) == []  # whoever asks for that needs it
    ways = [way.options for way in remedies(planned(**OURS, **{"model.checkpoint_every": 4}))]
    assert {"model.attention": "sdpa"} in ways
    assert not any("model.activation_checkpointing" in way for way in ways)


def test_modules_of_others_have_only_remedies_of_the_trainer() -> None:
    own = {"trainer.precision": "16-mixed", "data.batch_size": 12}
    ways = [way.options for way in remedies(planned(largest=7, **own))]
    smaller = {"data.batch_size": "6", "trainer.accumulate_grad_batches": "2"}
    assert ways[0] == smaller
    assert ways[-2:] == [{"trainer.precision": "bf16-true"}, {"data.batch_size": "7"}]
    other = planned(largest=7, batch=24, **own)  # its loader gives batches of another size
    assert [way.options for way in remedies(other)] == [{"trainer.precision": "bf16-true"}]


def test_together_they_leave_the_model_alone_first() -> None:
    gentle, least = combined_remedies(planned(largest=0, **OURS))
    kept = {
        "model.attention": "sdpa",
        "model.activation_checkpointing": "true",
        "data.batch_size": "1",
        "trainer.accumulate_grad_batches": "24",
    }
    assert gentle.options == {"trainer.precision": "bf16-mixed", **kept}
    assert least.options == {"trainer.precision": "bf16-true", **kept, "model.optimizer": "sgd"}
    assert "the optimizer" in least.changes
    assert "the optimizer" not in gentle.changes


def test_every_finding_has_a_remedy() -> None:
    names = [remedy.name for remedy in REMEDIES]
    assert len(names) == len({*names})
    assert {*get_args(FindingName)} <= {*names}
    for remedy in REMEDIES:
        has_sentence = bool(remedy.sentence) or remedy.name == "ranks"
        assert has_sentence == (remedy.name in get_args(FindingName))
        assert has_sentence or remedy.candidates or remedy.smaller_settings
    later = Finding.model_construct(name="cold_cache", saves_s=0.1, share=0.2)
    assert "cold cache" in remedy_of(later, made_record())
    assert likely_share(later) == 1.0


CHUNKED = {"model.loss": "chunked"}


def with_loss(loss: str | None, batch: int, context: int) -> Planned:
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
def test_it_is_offered_for_more_than_a_chunk_of_tokens(loss: str | None, batch: int, context: int, is_offered: bool):
    settings = [dict(setting.options) for setting in remedies(with_loss(loss, batch, context))]
    assert (CHUNKED in settings) == is_offered
    combined = [setting.options for setting in combined_remedies(with_loss(loss, batch, context))]
    assert all((options.get("model.loss") == "chunked") == is_offered for options in combined)
