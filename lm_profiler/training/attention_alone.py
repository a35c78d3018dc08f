"""Attention alone as a LightningModule, to measure its time and memory for backward, at any length and width."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn

from lm_profiler.models.config import check_attention_name
from lm_profiler.models.transformer import AttentionFunction, attention_function
from lm_profiler.training.fake_tokens import ENDLESS
from lm_profiler.usage_error import UsageError, expect

# Triton's choice (triton.testing.do_bench): more than any L2, and as much as the last cache of an MI300X
FILLER_BYTES = 256 * 2**20


class AttentionAlone(LightningModule):
    """Attention over random Q, K and V, without heads or projections: forward, and backward of the output's sum.

    Q, K and V are the module's parameters, so that the module's memory is the input of attention. Gradients are cleared
    at the end of each step, so that each step starts with only Q, K and V. There is no optimizer. The data determines
    the numbers of sequences and tokens: see `EmptyBatches`.

    Args:
        d_model: Width of Q, K and V (D).
        attention: `sdpa` is PyTorch's fused attention, `math` computes scores, mask and softmax one by one;
            `package.module:function` takes (q, k, v, is_causal), and is checked before it is timed.
        attention_options: Further arguments of your own attention function, such as tile sizes and the number of warps.
        is_causal: Whether a token does not see later tokens.
        compile: Compile the attention function with torch.compile.
        flush_cache: Overwrite 256 MiB before each pass, so that no cache holds Q, K and V, as `triton.testing.do_bench`
            does. The time of a pass excludes this; all figures of memory include the 256 MiB.
    """

    model: LoneAttention
    filler: Tensor  # the memory that is overwritten

    def __init__(
        self,
        d_model: int = 64,
        attention: str = "sdpa",
        attention_options: dict[str, Any] | None = None,
        is_causal: bool = True,
        compile: bool = False,  # noqa: A002 - the option's name on the command line
        flush_cache: bool = False,
    ) -> None:
        super().__init__()
        expect(d_model >= 1, "d_model", "1 or more", d_model)
        check_attention_name(attention)
        self.attend = attention_function(attention, is_causal, attention_options)
        self.attention_options = attention_options
        self.d_model = d_model
        self.attention = attention
        self.is_causal = is_causal
        self.compile_model = compile  # `compile` is a method of nn.Module
        self.flush_cache = flush_cache

    def setup(self, stage: str) -> None:
        """Raise UsageError for a precision with a gradient scaler: there is no optimizer, which a scaler needs."""
        if stage != "fit":
            return
        has_scaler = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        expected = "one without a gradient scaler, which needs an optimizer: bf16-mixed or 16-true"
        expect(not has_scaler, "trainer.precision", expected, self.trainer.precision)

    def configure_model(self) -> None:
        """Make the attention and its inputs, of the sizes that the data has."""
        # In this hook the strategy decides device and dtype. Lightning calls it once for each verb.
        if hasattr(self, "model"):
            return
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, EmptyBatches):
            raise UsageError(
                f"data: expected lm_profiler.training.EmptyBatches for attention alone, given {type(data).__name__}"
            )
        self.model = LoneAttention(
            self.attend, (data.batch_size, 1, data.context_length, self.d_model)
        )
        if self.compile_model:
            self.model.compile()
        if self.flush_cache:
            filler = torch.empty(FILLER_BYTES, dtype=torch.uint8)
            self.register_buffer("filler", filler, persistent=False)

    def configure_optimizers(self) -> None:
        return None  # nothing is learnt

    def forward(self) -> Tensor:
        out_B1TD: Tensor = self.model()
        return out_B1TD

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.forward().sum()  # a loss whose derivative costs almost nothing

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.forward()

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self._flush()

    def on_validation_batch_start(
        self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._flush()

    def on_before_backward(self, loss: Tensor) -> None:
        self._flush()

    def _flush(self) -> None:
        """Overwrite the filler, so that the cache holds nothing of the last pass; the time of a hook is in no pass."""
        if self.flush_cache:
            self.filler.zero_()

    def on_train_batch_end(
        self, outputs: object, batch: Tensor, batch_idx: int
    ) -> None:
        self.zero_grad()

    def tokens_in(self, batch: Tensor) -> int:
        return batch.shape[0] * batch.shape[1]


class LoneAttention(nn.Module):
    """Calls ``attend`` on its parameters: random Q, K and V of ``shape`` [B, 1, T, D]."""

    def __init__(self, attend: AttentionFunction, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.attend = attend
        self.q, self.k, self.v = (nn.Parameter(torch.randn(shape)) for _ in range(3))

    def forward(self) -> Tensor:
        return self.attend(self.q, self.k, self.v)


class EmptyBatches(LightningDataModule):
    """Batches [B, T, 0], which have a shape and no content: they cost no time and no memory.

    Args:
        batch_size: Sequences at once (B), per device.
        context_length: Tokens in a sequence (T).
    """

    def __init__(self, batch_size: int = 8, context_length: int = 1024) -> None:
        super().__init__()
        expect(batch_size >= 1, "batch_size", "1 or more", batch_size)
        expect(context_length >= 1, "context_length", "1 or more", context_length)
        self.batch_size = batch_size
        self.context_length = context_length

    def train_dataloader(self) -> Endless:
        return Endless(torch.empty(self.batch_size, self.context_length, 0))

    val_dataloader = train_dataloader


class Endless:
    """A loader that yields the same batch forever. It has a length, without which Lightning would prefetch batches."""

    def __init__(self, batch: Tensor) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return ENDLESS

    def __iter__(self) -> Iterator[Tensor]:
        return repeat(self._batch)
