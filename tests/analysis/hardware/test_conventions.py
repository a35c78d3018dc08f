"""MFU by the conventions of others: their formulas on sizes that are known."""

from __future__ import annotations

import pytest
from made_runs import made_record

from lm_profiler.analysis.hardware.conventions import conventions
from lm_profiler.record.run_record import Flops, ModelFacts, RunRecord, Throughput, Utilisation

# Llama 3 8B (Grattafiori et al. 2024), context 8192, and what its matmuls and attention take in full.
LAYERS, WIDTH, HEADS, HEAD, CONTEXT, VOCABULARY = 32, 4096, 32, 128, 8192, 128_256
PARAMETERS = 8_030_261_248
EMBEDDING = VOCABULARY * WIDTH
ATTENTION = 12 * LAYERS * HEADS * HEAD * CONTEXT  # per token
TOKENS = 4 * CONTEXT


def llama(**changes: object) -> RunRecord:
    dispatched = 6 * (PARAMETERS - EMBEDDING) + ATTENTION
    flops = Flops(
        forward=dispatched * TOKENS // 3,
        backward=dispatched * TOKENS * 2 // 3,
        recomputation=0,
        attention=ATTENTION * TOKENS // 3,
    )
    fields = {**dict.fromkeys(Utilisation.model_fields), "mfu": 0.40, "flops": flops, "by_dtype": []}
    model = ModelFacts(
        class_path="Llama",
        parameters=PARAMETERS,
        parameters_without_embedding=PARAMETERS - EMBEDDING,
        trainable_parameters=PARAMETERS,
        bytes=0,
        precision="bf16-true",
        optimizers=[],
        accumulate_grad_batches=1,
        layers=LAYERS,
        width=WIDTH,
        vocabulary=VOCABULARY,
    )
    facts = {
        "utilisation": Utilisation.model_validate(fields),
        "throughput": Throughput(tokens_per_s=None, tokens_per_step=TOKENS),
        "model": model,
    }
    return made_record(**{**facts, **changes})


def test_each_convention_is_its_formula() -> None:
    by_name = {convention.name: convention for convention in conventions(llama())}
    truths = {
        "dispatched": 6 * (PARAMETERS - EMBEDDING) + ATTENTION,
        "PaLM": 6 * PARAMETERS + ATTENTION,
        "Megatron-LM": 72 * LAYERS * WIDTH**2 * (1 + CONTEXT / (6 * WIDTH) + VOCABULARY / (12 * LAYERS * WIDTH)),
        "Hugging Face": 6 * (PARAMETERS - EMBEDDING),
        "torchtitan": 6 * (PARAMETERS - EMBEDDING) + ATTENTION,
    }
    assert {name: by_name[name].flops_per_token for name in by_name} == pytest.approx(truths, rel=1e-6)
    assert by_name["dispatched"].mfu == pytest.approx(0.40)
    for name, truth in truths.items():
        assert by_name[name].mfu == pytest.approx(0.40 * truth / truths["dispatched"], rel=1e-6)
        assert by_name[name].source


def test_what_a_run_does_not_show_is_unknown_and_named() -> None:
    no_model = {convention.name: convention for convention in conventions(llama(model=None))}
    assert no_model["dispatched"].mfu == pytest.approx(0.40)
    assert no_model["PaLM"].flops_per_token is None
    assert no_model["Megatron-LM"].missing
    assert conventions(llama(throughput=None)) == []
    assert conventions(llama(utilisation=None)) == []
