"""Mixture of experts: feed-forward layers of which a router chooses a few for each token.

Shapes: N tokens, D width of the model, F width of an expert, X experts, K experts per token, M = N·K rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm_profiler.models.config import TransformerConfig
from lm_profiler.models.linear import Linear

_ALIGNED_BYTES = 16  # rows of the factors of ``grouped_mm`` must be multiples of it


class ExpertMatrices(nn.Module):
    """One matrix per expert, [X, inputs, outputs], each initialized like that of a ``Linear``."""

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
        """Return [M, outputs]: the product of each expert's rows with its matrix.

        ``rows`` [M, inputs] are sorted by expert; the rows of expert x end before row ``ends_X[x]``.
        """
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
    """Return whether ``grouped_mm`` accepts matrices of this dtype and these widths, on all devices."""
    if weight.dtype != torch.bfloat16:
        return False
    for width in weight.shape[1:]:
        row_bytes = width * weight.element_size()
        if row_bytes % _ALIGNED_BYTES != 0:
            return False
    return True


def multiply_one_by_one(rows: Tensor, weight: Tensor, ends_X: Tensor) -> Tensor:
    """Return what ``grouped_mm`` would, by one product per expert; the host waits for the device."""
    begin = 0
    products = []
    ends = _ends_on_host(ends_X, len(rows))
    for expert, end in enumerate(ends):
        rows_of_expert = rows[begin:end]
        products.append(rows_of_expert @ weight[expert])
        begin = end
    return torch.cat(products)


def _ends_on_host(ends_X: Tensor, row_count: int) -> list[int]:
    """Return ``ends_X`` as numbers; of a tensor without data, as in a plan, the ends of a balanced load."""
    has_data = type(ends_X) is Tensor and not ends_X.is_meta
    if has_data:
        ends: list[int] = ends_X.tolist()
        return ends
    experts = len(ends_X)
    balanced_ends = []
    for expert in range(experts):
        balanced_ends.append(row_count * (expert + 1) // experts)
    return balanced_ends


class Experts(nn.Module):
    """SwiGLU layers, of which a router chooses K for each token, [B, T, D] to [B, T, D].

    A token's outputs are weighted by the softmax of the chosen experts' scores, as in Mixtral (Jiang et al. 2024,
    section 2.1). The loss has no term that balances the load. ``load_X`` is the number of tokens that were sent to each
    expert in training; recomputed forward passes count again.
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
        """Return [B, T, D]: for each token the outputs of its experts, weighted by the router's scores."""
        x_ND = x_BTD.flatten(0, 1)
        scores_NX = self.router(x_ND)
        chosen_scores_NK, experts_NK = scores_NX.topk(self.experts_per_token)
        precise_dtype = torch.promote_types(scores_NX.dtype, torch.float32)
        weights_NK = chosen_scores_NK.softmax(dim=-1, dtype=precise_dtype)

        # A row is a token that is sent to one of its experts: token 0 to its first expert, to its second, and so on.
        expert_of_row_M = experts_NK.flatten()
        load_X = self._count_rows(expert_of_row_M)
        ends_X = load_X.cumsum(0).to(torch.int32)

        # Sorted by expert, so that an expert multiplies all its rows at once. The host reads no number of rows, for
        # which it would have to wait for the device.
        order_M = expert_of_row_M.argsort(stable=True)
        token_of_row_M = order_M // self.experts_per_token
        rows_MD = x_ND[token_of_row_M]
        gate_MF = self.gate(rows_MD, ends_X)
        up_MF = self.up(rows_MD, ends_X)
        sorted_outputs_MD = self.down(F.silu(gate_MF) * up_MF, ends_X)

        # Back in the order of the tokens, whose K rows are summed.
        place_of_row_M = order_M.argsort()
        outputs_MD = sorted_outputs_MD[place_of_row_M]
        weights_M = weights_NK.flatten().to(outputs_MD.dtype)
        weighted_MD = outputs_MD * weights_M[:, None]
        weighted_NKD = weighted_MD.view(-1, self.experts_per_token, x_ND.shape[1])
        output_ND: Tensor = weighted_NKD.sum(dim=1)
        return output_ND.view_as(x_BTD)

    def _count_rows(self, expert_of_row_M: Tensor) -> Tensor:
        """Return the number of rows of each expert; in training, add it to ``self.load_X``."""
        load_X = torch.zeros_like(self.load_X)
        rows_M = torch.ones_like(expert_of_row_M)
        load_X.scatter_add_(0, expert_of_row_M, rows_M)
        if self.training:
            self.load_X += load_X
        return load_X
