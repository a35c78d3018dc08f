"""MFU by the conventions of others: their formulas on sizes that are known."""

import pytest
from made_environment import made_utilisation
from made_parts import made_model
from made_runs import made_record

from lm_profiler.analysis.hardware.conventions import conventions
from lm_profiler.record.run_record import Flops, RunRecord, Throughput
from lm_profiler.report.run.mfu_table import mfu_table

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
    in_products = dict.fromkeys(("parameters_without_embedding", "parameters_in_products"), PARAMETERS - EMBEDDING)
    model = made_model(parameters=PARAMETERS, **in_products, layers=LAYERS, width=WIDTH, vocabulary=VOCABULARY)
    facts = {
        "utilisation": made_utilisation(mfu=0.40, flops=flops),
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


@pytest.mark.parametrize("layers, experts, published", [(24, 32, 26_481_681_792), (36, 128, 38_044_854_144)])
def test_torchtitans_flops_of_gpt_oss(layers: int, experts: int, published: int) -> None:
    """FLOPs a token of gpt-oss 20B and 120B, context 4096, windows in full: torchtitan#4300, column "Reference"."""
    width, heads, head, keys, vocabulary, per_token = 2880, 64, 64, 8, 201_088, 4
    attention = 2 * (width + 1) * heads * head + 2 * (width + 1) * keys * head
    attention += heads + width - heads * head  # sinks; the bias of the output is as wide as the model
    router = (width + 1) * experts
    expert = (width + 1) * 2 * width + (width + 1) * width
    block = attention + router + per_token * expert + 2 * width
    in_products = layers * block + width + vocabulary * width
    record = llama()
    attention_flops = 4 * layers * heads * head * 4096 * TOKENS  # of forward, in full
    flops = record.utilisation.flops.model_copy(update={"attention": attention_flops})
    changed = record.model_copy(
        update={
            "model": record.model.model_copy(update={"parameters_in_products": in_products}),
            "utilisation": record.utilisation.model_copy(update={"flops": flops}),
        }
    )
    by_name = {convention.name: convention for convention in conventions(changed)}
    assert by_name["torchtitan"].flops_per_token == published


def test_missing_figures_make_a_convention_unknown_or_a_lower_bound() -> None:
    no_model = {convention.name: convention for convention in conventions(llama(model=None))}
    assert no_model["dispatched"].mfu == pytest.approx(0.40)
    assert no_model["PaLM"].flops_per_token is None
    assert no_model["Megatron-LM"].missing
    assert no_model["torchtitan"].missing
    assert conventions(llama(throughput=None)) == []
    assert conventions(llama(utilisation=None)) == []
    use = llama().utilisation
    flops = use.flops.model_copy(update={"uncounted": ["mine::kernel"]})
    table = mfu_table(llama(utilisation=use.model_copy(update={"flops": flops})))
    bounds = {row[0].text: (row[1].bound, row[2].bound) for row in table.rows}
    assert bounds.pop("dispatched") == ("at least", "at least")
    assert set(bounds.values()) == {(None, None)}
