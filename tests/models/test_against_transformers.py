"""Our models and those of Hugging Face's transformers compute the same logits with the same weights."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lm_profiler.models.config import TransformerConfig
from lm_profiler.models.transformer import Transformer

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {"d_model": 24, "d_ff": 40, "num_layers": 2, "num_heads": 4, "vocab_size": 37}
THEIR_SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 37,
    "attention_dropout": 0.0,
}
OURS_BY_THEIRS = {
    r"^model\.embed_tokens\.": "embedding.",
    r"^model\.norm\.": "norm.",
    r"^lm_head\.": "head.",
    r"^model\.layers\.": "blocks.",
    r"\.self_attn\.": ".attention.",
    r"\.q_proj\.": ".query.",
    r"\.k_proj\.": ".key.",
    r"\.v_proj\.": ".value.",
    r"\.o_proj\.": ".output.",
    r"\.q_norm\.": ".query_norm.",
    r"\.k_norm\.": ".key_norm.",
    r"\.input_layernorm\.": ".attention_norm.",
    r"\.post_attention_layernorm\.": ".feed_forward_norm.",
    r"\.mlp\.gate_proj\.": ".feed_forward.gate.",
    r"\.mlp\.up_proj\.": ".feed_forward.up.",
    r"\.mlp\.down_proj\.": ".feed_forward.down.",
    r"\.mlp\.gate\.": ".feed_forward.router.",
}


def llama() -> tuple[TransformerConfig, Any]:
    """RoPE's long wavelengths are stretched; with this base, some of 16 fully, some in part, and some not."""
    sizes, their_sizes = {**SIZES, "head_width": 32}, {**THEIR_SIZES, "head_dim": 32}
    config = TransformerConfig(
        **sizes, num_kv_heads=2, tied_embeddings=True, rope_theta=500_000.0, rope_stretch=32.0, attention="math"
    )
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theirs = transformers.LlamaConfig(
        **their_sizes, num_key_value_heads=2, tie_word_embeddings=True, rms_norm_eps=1e-5, rope_parameters=scaling
    )
    return config, transformers.LlamaForCausalLM(theirs)


def qwen3() -> tuple[TransformerConfig, Any]:
    config = TransformerConfig(**SIZES, num_kv_heads=1, head_width=10, qk_norm=True, norm_eps=1e-6)
    theirs = transformers.Qwen3Config(
        **THEIR_SIZES, num_key_value_heads=1, head_dim=10, rms_norm_eps=1e-6, tie_word_embeddings=False
    )
    return config, transformers.Qwen3ForCausalLM(theirs)


def qwen3_experts() -> tuple[TransformerConfig, Any]:
    config = TransformerConfig(
        **SIZES, num_kv_heads=2, head_width=6, qk_norm=True, norm_eps=1e-6, num_experts=5, experts_per_token=3
    )
    theirs = transformers.Qwen3MoeConfig(
        **THEIR_SIZES,
        moe_intermediate_size=40,
        num_key_value_heads=2,
        head_dim=6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        num_experts=5,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        experts_implementation="eager",  # grouped_mm takes no float64
    )
    return config, transformers.Qwen3MoeForCausalLM(theirs)


def gpt2() -> tuple[TransformerConfig, Any]:
    config = TransformerConfig(**SIZES, architecture="gpt2", num_positions=16, tied_embeddings=True)
    theirs = transformers.GPT2Config(
        n_embd=24, n_inner=40, n_layer=2, n_head=4, vocab_size=37, n_positions=16, attn_pdrop=0.0, resid_pdrop=0.0
    )
    return config, transformers.GPT2LMHeadModel(theirs)


def weights_by_our_names(theirs: nn.Module) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for name, tensor in theirs.state_dict().items():
        for pattern, replacement in OURS_BY_THEIRS.items():
            name = re.sub(pattern, replacement, name)
        if name.endswith(".experts.gate_up_proj"):  # [X, 2F, D]
            gate, up = tensor.transpose(1, 2).chunk(2, dim=2)
            weights[name.replace("mlp.experts.gate_up_proj", "feed_forward.gate.weight")] = gate
            weights[name.replace("mlp.experts.gate_up_proj", "feed_forward.up.weight")] = up
        elif name.endswith(".experts.down_proj"):  # [X, D, F]
            weights[name.replace("mlp.experts.down_proj", "feed_forward.down.weight")] = tensor.transpose(1, 2)
        else:
            weights[name] = tensor
    return weights


def weights_of_gpt2(theirs: nn.Module) -> dict[str, Tensor]:
    """Their maps are stored transposed, and those of queries, keys and values as one."""
    names = {
        "ln_1.": "attention_norm.",
        "ln_2.": "feed_forward_norm.",
        "attn.c_proj.": "attention.output.",
        "mlp.c_fc.": "feed_forward.up.",
        "mlp.c_proj.": "feed_forward.down.",
        "wte.": "embedding.",
        "wpe.": "position_embedding.",
        "ln_f.": "norm.",
        "h.": "blocks.",
    }
    weights: dict[str, Tensor] = {}
    for full_name, tensor in theirs.state_dict().items():
        name = full_name.removeprefix("transformer.")
        is_stored_transposed = ".c_" in name and tensor.ndim == 2
        tensor = tensor.T if is_stored_transposed else tensor
        for theirs_part, our_part in names.items():
            name = re.sub(rf"(^|\.){re.escape(theirs_part)}", rf"\1{our_part}", name)
        if ".attn.c_attn." in name:
            for part, piece in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                weights[name.replace("attn.c_attn", f"attention.{part}")] = piece
        else:
            weights[name] = tensor
    return weights


@pytest.mark.parametrize("make", [llama, qwen3, qwen3_experts, gpt2], ids=lambda make: make.__name__)
def test_logits_are_those_of_transformers(make: Any) -> None:
    torch.manual_seed(0)
    config, theirs = make()
    for parameter in theirs.parameters():  # gains of 1 and biases of 0 would hide those that are left out
        nn.init.normal_(parameter, std=0.3)
    theirs = theirs.double().eval()
    weights = weights_of_gpt2(theirs) if config.architecture == "gpt2" else weights_by_our_names(theirs)
    if config.tied_embeddings:
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith(("head.", "lm_head."))}
    ours = Transformer(config).double()
    ours.load_state_dict(weights)
    ids = torch.randint(37, (2, 11))
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-6, atol=1e-6)
