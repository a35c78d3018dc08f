"""Computes the MFU of one run by the conventions of other projects, which differ in how they count a token's FLOPs.

Our own convention counts the operators that torch dispatched. The others compute FLOPs from the sizes of a model: N
parameters, L layers of width h with H heads of width Q, a vocabulary of V, a context of T. The FLOPs of attention in
full, 12·L·H·Q·T per token, are three times those of forward that were counted in fused attention. None of them counts
recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass

from lm_profiler.record.run_record import RunRecord

DISPATCHED = "dispatched"

# The record has the FLOPs of attention in forward; backward takes twice as many.
_FORWARD_AND_BACKWARD = 3


@dataclass(frozen=True)
class Convention:
    """A way to count the FLOPs of a token, forward and backward. None means unknown."""

    name: str
    formula: str
    source: str
    flops_per_token: float | None
    mfu: float | None
    missing: str = ""  # what the formula needs but the run does not show


@dataclass(frozen=True)
class _Sizes:
    """The sizes that the formulas need. None means that the run does not show them."""

    tokens: int  # tokens per step, on all ranks
    dispatched_flops: int
    parameters: int | None
    without_embedding: int | None
    in_products: int | None
    attention_per_token: float | None
    layers: int | None
    width: int | None
    vocabulary: int | None


def conventions(record: RunRecord) -> list[Convention]:
    """Return all conventions, ours first; none if FLOPs or tokens of the run are unknown."""
    sizes = _sizes_of_run(record)
    if sizes is None:
        return []
    return [
        _convention(
            record,
            sizes,
            DISPATCHED,
            "FLOPs of all matmuls, convolutions and attention that ran, except recomputation",
            "lm_profiler",
            sizes.dispatched_flops / sizes.tokens,
        ),
        _palm_convention(record, sizes),
        _megatron_convention(record, sizes),
        _hugging_face_convention(record, sizes),
        _torchtitan_convention(record, sizes),
    ]


def _sizes_of_run(record: RunRecord) -> _Sizes | None:
    """Return what the conventions count with, from the record; None if FLOPs or tokens of a step are unknown."""
    use = record.utilisation
    rate = record.throughput
    if use is None or rate is None or not rate.tokens_per_step:
        return None
    tokens = rate.tokens_per_step
    attention_per_token = None
    if use.flops.attention:
        forward_and_backward = _FORWARD_AND_BACKWARD * use.flops.attention
        attention_per_token = forward_and_backward / tokens
    model = record.model
    if model is None:
        return _Sizes(
            tokens=tokens,
            dispatched_flops=use.flops.model,
            parameters=None,
            without_embedding=None,
            in_products=None,
            attention_per_token=attention_per_token,
            layers=None,
            width=None,
            vocabulary=None,
        )
    return _Sizes(
        tokens=tokens,
        dispatched_flops=use.flops.model,
        parameters=model.parameters,
        without_embedding=model.parameters_without_embedding,
        in_products=model.parameters_in_products,
        attention_per_token=attention_per_token,
        layers=model.layers,
        width=model.width,
        vocabulary=model.vocabulary,
    )


def _palm_convention(record: RunRecord, sizes: _Sizes) -> Convention:
    """Return the FLOPs of a token, and the MFU, as the PaLM paper counts them."""
    flops_per_token = None
    if sizes.parameters is not None and sizes.attention_per_token is not None:
        flops_per_token = 6 * sizes.parameters + sizes.attention_per_token
    return _convention(
        record,
        sizes,
        "PaLM",
        "6·N + 12·L·H·Q·T",
        "Chowdhery et al. 2022, appendix B",
        flops_per_token,
        missing="the FLOPs of fused attention",
    )


def _megatron_convention(record: RunRecord, sizes: _Sizes) -> Convention:
    """Return the FLOPs of a token, and the MFU, as Megatron-LM's paper counts them."""
    layers, width, vocabulary = sizes.layers, sizes.width, sizes.vocabulary
    flops_per_token = None
    missing = "the layers, width and vocabulary of the model"
    if layers and width and vocabulary:
        missing = "the FLOPs of fused attention"
        if sizes.attention_per_token is not None:
            # The formula multiplied out: 72·L·h² + 12·L·h·T + 6·V·h. The second term is attention, with h = H·Q.
            blocks = 72 * layers * width**2
            logits = 6 * vocabulary * width
            flops_per_token = blocks + sizes.attention_per_token + logits
    return _convention(
        record,
        sizes,
        "Megatron-LM",
        "72·L·h²·(1 + T/(6·h) + V/(12·L·h)), for a feed-forward width of 4·h",
        "Narayanan et al. 2021, section 5.1, without recomputation",
        flops_per_token,
        missing=missing,
    )


def _hugging_face_convention(record: RunRecord, sizes: _Sizes) -> Convention:
    """Return the FLOPs of a token, and the MFU, as transformers counts them."""
    flops_per_token = None
    if sizes.without_embedding is not None:
        flops_per_token = 6.0 * sizes.without_embedding
    return _convention(
        record,
        sizes,
        "Hugging Face",
        "6·N without embeddings",
        "transformers, PreTrainedModel.floating_point_ops",
        flops_per_token,
        missing="the parameters of the model",
    )


def _torchtitan_convention(record: RunRecord, sizes: _Sizes) -> Convention:
    """Return the FLOPs of a token, and the MFU, as torchtitan counts them."""
    flops_per_token = None
    if sizes.in_products is not None and sizes.attention_per_token is not None:
        flops_per_token = 6 * sizes.in_products + sizes.attention_per_token
    missing = "the FLOPs of fused attention"
    if sizes.in_products is None:
        missing = "the parameters that a token is multiplied by"
    return _convention(
        record,
        sizes,
        "torchtitan",
        "6·N + 12·L·H·Q·T, where N excludes embeddings that are looked up and counts only the experts of a token",
        "torchtitan, get_moe_model_nparams_and_flops; windows count in full",
        flops_per_token,
        missing,
    )


def _convention(
    record: RunRecord,
    sizes: _Sizes,
    name: str,
    formula: str,
    source: str,
    flops_per_token: float | None,
    missing: str = "",
) -> Convention:
    """Return a convention with its MFU, over as many devices as the run's own MFU."""
    if flops_per_token is None:
        return Convention(
            name, formula, source, flops_per_token=None, mfu=None, missing=missing
        )
    use = record.utilisation
    mfu = None
    if use is not None and use.mfu is not None and sizes.dispatched_flops:
        # the run's MFU is that of the dispatched FLOPs
        flops = flops_per_token * sizes.tokens
        mfu = use.mfu * flops / sizes.dispatched_flops
    return Convention(name, formula, source, flops_per_token, mfu)
