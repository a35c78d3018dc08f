"""Mixture of experts: feed-forward layers of which a router chooses a few for each token.

Shapes: N tokens, D width of the model, F width of an expert, X experts, K experts per token, M = N·K rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm_profiler.models.config import TransformerConfig
from lm_profiler.models.linear import Linear

_ALIGNED_BYTES = 16  # a row of the factors of ``grouped_mm`` is a multiple of them


class ExpertMatrices(nn.Module):
    """One matrix per expert, [X, inputs, outputs], each started like that of a ``Linear``."""

    def __init__(self, num_experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        weight = torch.empty(num_experts, inputs, outputs)
        self.weight = nn.Parameter(weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        inputs = self.weight.shape[1]
        std = inputs**-0.5
        nn.init.trunc_normal_(self.weight, std=std, a=-3 * std, b=3 * std)

    def forward(self, rows: Tensor, ends_X: Tensor) -> Tensor:
        """Return [M, outputs]: ``rows`` up to the first of ``ends_X`` times the first expert's matrix, and so on."""
        weight: Tensor = self.weight
        device_type = rows.device.type
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            rows = rows.to(dtype)
            weight = weight.to(dtype)
        if can_group(weight):
            return F.grouped_mm(rows, weight, offs=ends_X)
        return multiply_one_by_one(rows, weight, ends_X)


def can_group(weight: Tensor) -> bool:
    """Return whether ``grouped_mm`` takes matrices of this dtype and of these widths, on all devices."""
    if weight.dtype != torch.bfloat16:
        return False
    for width in weight.shape[1:]:
        row_bytes = width * weight.element_size()
        if row_bytes % _ALIGNED_BYTES != 0:
            return False
    return True


def multiply_one_by_one(rows: Tensor, weight: Tensor, ends_X: Tensor) -> Tensor:
    """Return what ``grouped_mm`` returns, by a product for each expert, which waits for the device."""
    begin = 0
    products = []
    for expert, end in enumerate(_host_ends(ends_X, len(rows))):
        product = rows[begin:end] @ weight[expert]
        products.append(product)
        begin = end
    return torch.cat(products)


def _host_ends(ends_X: Tensor, rows: int) -> list[int]:
    """Return ``ends_X`` as numbers; for a tensor without data, as in a plan, those of a balanced load."""
    has_data = type(ends_X) is Tensor and not ends_X.is_meta
    if has_data:
        ends: list[int] = ends_X.tolist()
        return ends
    experts = len(ends_X)
    return [rows * expert // experts for expert in range(1, experts + 1)]


class Experts(nn.Module):
    """SwiGLU layers, of which a router chooses K for each token, [B, T, D] to [B, T, D].

    A token's outputs are weighted by the softmax of the chosen experts' scores, as in Mixtral (Jiang et al. 2024,
    section 2.1). Nothing balances the load: the loss has no term for it. ``load_X`` is the number of tokens that were
    sent to each expert in training, which tokens of recomputed passes count in again.
    """

    load_X: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        num_experts = config.num_experts
        self.experts_per_token = config.experts_per_token
        self.router = Linear(config.d_model, num_experts)
        self.gate = ExpertMatrices(num_experts, config.d_model, config.d_ff)
        self.up = ExpertMatrices(num_experts, config.d_model, config.d_ff)
        self.down = ExpertMatrices(num_experts, config.d_ff, config.d_model)
        no_load_X = torch.zeros(num_experts, dtype=torch.int64)
        self.register_buffer("load_X", no_load_X, persistent=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return [B, T, D]: for each token the outputs of its experts, weighted by the router's scores.

        Rows are sorted by expert, so that an expert multiplies all its tokens at once, and are put back in order.
        """
        x_ND = x_BTD.flatten(0, 1)
        scores_NX = self.router(x_ND)
        chosen_scores_NK, experts_NK = scores_NX.topk(self.experts_per_token)
        precise_dtype = torch.promote_types(scores_NX.dtype, torch.float32)
        weights_NK = chosen_scores_NK.softmax(dim=-1, dtype=precise_dtype)

        expert_of_row_M = experts_NK.flatten()
        load_X = self._load(expert_of_row_M)
        ends_X = load_X.cumsum(0).to(torch.int32)

        # All rows of an expert stand together; no number of rows is read by the host, which would wait for it.
        order_M = expert_of_row_M.argsort(stable=True)
        token_of_row_M = order_M // self.experts_per_token
        rows_MD = x_ND[token_of_row_M]
        gate_MF = self.gate(rows_MD, ends_X)
        up_MF = self.up(rows_MD, ends_X)
        sorted_outputs_MD = self.down(F.silu(gate_MF) * up_MF, ends_X)

        place_of_row_M = order_M.argsort()
        outputs_MD = sorted_outputs_MD[place_of_row_M]
        weights_M1 = weights_NK.flatten()[:, None].to(outputs_MD.dtype)
        weighted_MD = outputs_MD * weights_M1
        weighted_NKD = weighted_MD.view(-1, self.experts_per_token, x_ND.shape[1])
        output_ND: Tensor = weighted_NKD.sum(dim=1)
        return output_ND.view_as(x_BTD)

    def _load(self, expert_of_row_M: Tensor) -> Tensor:
        """Return the number of rows of each expert; in training add them to ``load_X``."""
        load_X = torch.zeros_like(self.load_X)
        rows_M = torch.ones_like(expert_of_row_M)
        load_X.scatter_add_(0, expert_of_row_M, rows_M)
        if self.training:
            self.load_X += load_X
        return load_X
