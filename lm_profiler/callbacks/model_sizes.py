"""Reads the sizes of a model from its parameters and from its config."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

# names of sizes in the configs of models: of transformers, of models like GPT-2 in transformers, and our own
_SIZE_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "width": ("hidden_size", "n_embd", "d_model"),
    "vocabulary": ("vocab_size",),
}
_TIED_NAMES = ("tie_word_embeddings", "tied_embeddings")
_EXPERTS_NAMES = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERTS_PER_TOKEN_NAMES = ("num_experts_per_tok", "experts_per_token")


def elements(tensors: Iterable[torch.Tensor]) -> int:
    """Return how many elements all ``tensors`` have together."""
    return sum(tensor.numel() for tensor in tensors)


def embedding_weights(module: nn.Module) -> dict[int, nn.Parameter]:
    """Return the weights of all embeddings, by their identity, so that a tied weight counts once."""
    weights = {}
    for part in module.modules():
        weight = getattr(part, "weight", None)
        if _is_embedding(part) and isinstance(weight, nn.Parameter):
            weights[id(weight)] = weight
    return weights


def _is_embedding(part: nn.Module) -> bool:
    return any(base.__name__ == "Embedding" for base in type(part).__mro__)


def parameters_in_products(module: nn.Module) -> int | None:
    """Return how many parameters a token is multiplied by, as torchtitan counts them (``torchtitan/models/utils.py``).

    They are all parameters except those of embeddings that only look up rows, and of experts that the token is not sent
    to. None if it is unknown how many experts a token is sent to.
    """
    in_look_ups = elements(_embeddings_without_products(module))
    in_experts = elements(_expert_weights(module))
    in_all = elements(module.parameters())
    if not in_experts:
        return in_all - in_look_ups
    experts = _integer_in_config(module, _EXPERTS_NAMES)
    experts_per_token = _integer_in_config(module, _EXPERTS_PER_TOKEN_NAMES)
    if not experts or not experts_per_token:
        return None
    in_experts_of_token = in_experts * experts_per_token // experts
    return in_all - in_look_ups - in_experts + in_experts_of_token


def _embeddings_without_products(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the weights of embeddings that are not also the matrix of the LM head."""
    embeddings = embedding_weights(module)
    ids_in_other_layers: set[int] = set()
    for part in module.modules():
        if _is_embedding(part):
            continue
        for weight in part.parameters(recurse=False):
            ids_in_other_layers.add(id(weight))
    is_tied = bool(_integer_in_config(module, _TIED_NAMES))
    vocabulary = _integer_in_config(module, _SIZE_NAMES["vocabulary"])
    for weight_id, weight in embeddings.items():
        has_row_per_token = weight.shape[0] == vocabulary
        is_tied_by_config = is_tied and has_row_per_token
        if weight_id not in ids_in_other_layers and not is_tied_by_config:
            yield weight


def _expert_weights(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the weights of experts among which a router chooses, without those of the router itself."""
    ids_seen = set()  # experts may be parts of other experts, and share weights
    for path, part in module.named_modules():
        if not _holds_experts(path, part):
            continue
        for name, weight in part.named_parameters():
            is_of_router = "router" in name.split(".")
            if is_of_router or id(weight) in ids_seen:
                continue
            ids_seen.add(id(weight))
            yield weight


def _holds_experts(path: str, part: nn.Module) -> bool:
    class_name = type(part).__name__
    return "experts" in path.split(".") or "Experts" in class_name


def _integer_in_config(module: nn.Module, names: Iterable[str]) -> int | None:
    """Return the first integer with one of ``names`` in the configs of the parts of ``module``; None without one."""
    for part in module.modules():
        value = _first_integer(vars(part).get("config"), names)
        if value is not None:
            return value
    return None


def sizes_in_config(module: nn.Module) -> dict[str, int]:
    """Return the sizes of the model, by the keys of ``_SIZE_NAMES``, from the first config that has all of them.

    Empty if no part of ``module`` has such a config.
    """
    for part in module.modules():
        config = vars(part).get("config")
        sizes: dict[str, int] = {}
        for size, names in _SIZE_NAMES.items():
            value = _first_integer(config, names)
            if value is not None:
                sizes[size] = value
        if len(sizes) == len(_SIZE_NAMES):
            return sizes
    return {}


def _first_integer(config: object, names: Iterable[str]) -> int | None:
    """Return the first integer attribute of ``config`` with one of ``names``; None without one."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return int(value)
    return None
