"""After a run that did not fit: what would, as a command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tabled import run

from lm_profiler.record.collection import Entry
from lm_profiler.record.run import Failure, OutOfMemory
from lm_profiler.record.sweep import Cell
from lm_profiler.training.fits.remedies import remedies

COMMAND = "python -m lm_profiler fit --config a.yaml"


def failed(
    status: str, message: str, total_gib: float | None = None, remedies: Sequence[str] = (), **options: Any
) -> Entry:
    entry = run("a", failed=(status, message), **options)
    total = None if total_gib is None else round(total_gib * 2**30)
    said = OutOfMemory(requested=None, free=None, total=total, allocated=None, fragmented=None, allowed=None)
    failure = Failure(
        phase="forward",
        step=1,
        type="OutOfMemoryError",
        message=message,
        out_of_memory=said,
        remedies=tuple(remedies),
    )
    config = entry.config or {}
    own = {"vocab_size": 10_000, "activation_checkpointing": False}
    config["model"]["init_args"] |= own
    config["trainer"]["strategy"] = options.get("strategy", "auto")
    return replace(entry, record=entry.record.model_copy(update={"command": COMMAND, "failure": failure}))


def options_of(lines: list[str]) -> set[str]:
    """All that is offered."""
    return {word for line in lines[1:] for word in line.split() if word.startswith("--") and word != "--config"}


def test_a_refusal_offers_its_own_remedies_as_a_command():
    options = ["--model.optimizer=sgd", "--model.size=large"]
    assert remedies([failed("refused", "memory: expected less", remedies=options)]) == [
        "run:",
        f"  would fit, activations aside: {COMMAND} --model.optimizer=sgd",
        "  or instead: --model.size=large",
    ]


def test_out_of_memory_offers_batch_context_precision_and_checkpointing():
    # xl in fp32: 29.8 GiB of weights, gradients and states. 4 x 1024 tokens leave 172,800 bytes in each of 48 layers,
    # and logits: 32.1 GiB. Half of that fits 60 GiB at 90 %; 29.8 + 24.4 in bf16-mixed does not, 14.9 + 18.7 does.
    lines = remedies([failed("oom", "no room", 60, size="xl", context_length=1024)])
    assert lines[1] == f"  would fit, by an estimate of the activations: {COMMAND} --data.batch_size=2"
    assert options_of(lines) == {
        "--data.batch_size=2",
        "--data.context_length=512",
        "--trainer.precision=bf16-true",
        "--model.activation_checkpointing=true",
    }


def test_what_was_seen_not_to_fit_weighs_more_than_the_estimate():
    # By the estimate 33.8 GiB; it failed on 80, so activations take no less than 50.2, of which half still fits.
    lines = remedies([failed("oom", "no room", 80, size="xl", batch_size=1, context_length=512)])
    assert "--data.context_length=256" in options_of(lines)
    assert "--data.context_length=512" not in options_of(lines)


def test_where_the_weights_alone_do_not_fit_nothing_about_the_batch_is_offered():
    assert options_of(remedies([failed("oom", "no room", 28, size="xl")])) == {"--trainer.precision=bf16-true"}


@pytest.mark.parametrize(
    "entry",
    [
        run("a", [(0.1, 0.1)] * 6),
        run("a", failed=("failed", "it broke")),
        run("a", failed=("oom", "somebody else's module")),
        failed("refused", "memory: expected less\nwould fit: --model.size=small; prose is not read"),
        failed("oom", "no room", 60, precision="transformer-engine"),
        failed("oom", "no room", 60, strategy="fsdp"),
    ],
)
def test_nothing_is_offered_where_nothing_is_known(entry: Entry):
    assert remedies([entry]) == []


def test_a_cells_command_leaves_the_sweeps_folder_alone_and_repeats_are_told_once():
    arguments = ["fit", "--config=a b.yaml", "--log_dir=logs/sweep", "--name=cell"]
    cells = [Cell(id=f"cell,r{repeat}", overrides={}, repeat=repeat, arguments=arguments) for repeat in range(2)]
    found = failed("refused", "memory: expected less", remedies=["--model.size=large"])
    lines = remedies([replace(found, cell=cell, folder=Path(cell.id)) for cell in cells])
    assert lines == [
        "cell,r0:",
        "  would fit, activations aside: python -m lm_profiler fit '--config=a b.yaml' --model.size=large",
    ]
