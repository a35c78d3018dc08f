"""The language model as a LightningModule, which `fit`, `validate`, `test` and `predict` run."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import FSDPPrecision, MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.optim import Optimizer

from lm_profiler.measure import code_parts
from lm_profiler.models.config import FP8_CAPABILITY, preset
from lm_profiler.models.experts import Experts
from lm_profiler.models.transformer import Transformer, attention_function
from lm_profiler.torch_names import FUSED_DEVICES
from lm_profiler.training.data_parallel import shard_blocks
from lm_profiler.training.muon import MuonWithAdamW, split_parameters
from lm_profiler.training.offered import check_compile_mode
from lm_profiler.training.optimizers import (
    MUON,
    NAMES,
    NO_OPTIMIZER,
    check_name,
    optimizer_class,
    optimizer_options,
)
from lm_profiler.usage_error import expect, expect_one_of

_STAGES = ("train", "val", "test")


class KeptMetrics(nn.ModuleDict):
    """The loss and the perplexity of each stage, as ``train_loss`` and the like, kept by torchmetrics."""

    def __init__(self) -> None:
        from torchmetrics import MeanMetric  # half a second, and rarely needed
        from torchmetrics.text import Perplexity

        metrics: dict[str, nn.Module] = {}
        for stage in _STAGES:
            metrics[f"{stage}_loss"] = MeanMetric()
            metrics[f"{stage}_perplexity"] = Perplexity()
        super().__init__(metrics)

    def keep_float32(self) -> None:
        """Convert the sums and counts back to float32, after the module that contains them was converted.

        In bfloat16 they could count no further than 256, and in float16 no further than 65,504.
        """
        for metric in self.values():
            metric.set_dtype(torch.float32)  # type: ignore[operator]

    def log(
        self,
        module: LightningModule,
        stage: str,
        loss: Tensor,
        logits_BTV: Tensor,
        targets_BT: Tensor,
    ) -> None:
        """Update the metrics of ``stage``, and log them through ``module``; perplexity is computed in float32."""
        self[f"{stage}_loss"](loss.detach())
        self[f"{stage}_perplexity"](logits_BTV.detach().float(), targets_BT)
        for name in (f"{stage}_loss", f"{stage}_perplexity"):
            module.log(name, self[name])  # type: ignore[arg-type]


LossName = Literal["plain", "chunked"]

# (inputs, targets), token ids [B, T] each (int64); targets[:, t] is the token after inputs[:, t]
Batch = tuple[Tensor, Tensor]


def _as_tuple(checkpoint_every: int | list[int] | None) -> tuple[int, ...]:
    """Return the blocks to checkpoint as a tuple: one number, several, or none."""
    if checkpoint_every is None:
        return ()
    if isinstance(checkpoint_every, int):
        return (checkpoint_every,)
    return tuple(checkpoint_every)


def expect_fp8(strategy: Strategy) -> None:
    """Raise UsageError unless the device of ``strategy``, or the one that a rehearsal imitates, multiplies FP8."""
    device = strategy.root_device
    capability: tuple[int, int] | None = None
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
    world = getattr(strategy, "world", None)
    if world is not None:
        capability = world.gpu
    has_fp8 = capability is not None and capability >= FP8_CAPABILITY
    least = ".".join(map(str, FP8_CAPABILITY))
    expected = f"false, or an NVIDIA GPU of compute capability {least} or higher (Ada, Hopper, Blackwell)"
    device_text = device.type
    if capability is not None:
        device_text = f"compute capability {'.'.join(map(str, capability))}"
    expect(has_fp8, "model.fp8", expected, f"true on {device_text}")


class LanguageModel(LightningModule):
    """A decoder-only Transformer trained on next-token cross-entropy.

    It logs nothing by default: one `self.log` costs about 200 µs a step.

    Args:
        size: Preset with the dimensions: small, medium, large, xl or 2.7B; or a preset of another source, such as
            cs336-2026/xl, llama3/8B, llama3.2/1B, qwen3/0.6B or gpt2/small.
        d_model: Width of the residual stream; if not given, that of the preset.
        d_ff: Width inside the feed-forward layer; if not given, that of the preset.
        num_layers: Number of blocks; if not given, that of the preset.
        num_heads: Number of attention heads, a divisor of d_model; if not given, that of the preset.
        num_kv_heads: Number of heads of keys and values, each of which a group of query heads shares (grouped-query
            attention); a divisor of num_heads. If not given, that of the preset.
        head_width: Width of a head; if not given, that of the preset, or else d_model / num_heads.
        vocab_size: Number of token ids, also in the generated data; if not given, that of the preset.
        tied_embeddings: Use the token embedding also as the matrix of the LM head; if not given, as in the preset.
        num_experts: Number of experts per block (mixture of experts): feed-forward layers of width d_ff, among which a
            router chooses. 0 means a single layer without a router. If not given, that of the preset.
        experts_per_token: Number of experts that process each token; if not given, that of the preset, or else 2.
        fp8: Multiply the matrices of attention and SwiGLU in FP8 (8-bit floats), on a GPU that supports it.
        attention: `sdpa` is PyTorch's fused attention, `math` computes scores, mask and softmax one by one;
            `package.module:function` takes (q, k, v, is_causal), and is checked before it is timed.
        activation_checkpointing: Keep only each block's input; recompute the rest in the backward pass.
        checkpoint_every: Keep only the input of each group of this many blocks; [8, 2] nests groups of 2 blocks within
            groups of 8.
        compile: Compile the Transformer with torch.compile.
        compile_mode: Mode of torch.compile, such as reduce-overhead; used only if compile is true.
        loss: `plain` computes all logits at once; `chunked` computes the logits of 1,024 tokens at a time, and again in
            the backward pass, which saves memory.
        optimizer: adamw, sgd; `muon` updates the matrices of the blocks with Muon and the rest with AdamW; `none` runs
            forward and backward alone, without clipping; `package.module:Class` takes (parameters, lr, weight_decay),
            and is checked before it is timed.
        lr: Learning rate.
        weight_decay: Weight decay, on every parameter.
        fused: Use a fused optimizer kernel; if not given, one is used whenever the device has it and the run can use
            it.
        shard_optimizer_states: Each process of DDP keeps the optimizer's states of a part of the parameters, and sends
            these parameters to the other processes after its step (ZeRO stage 1, torch's ZeroRedundancyOptimizer).
        metrics: Compute loss and perplexity with torchmetrics and log them, as a real training does.
    """

    model: Transformer
    stays = False  # whether the module stays on its device after a run; set if nothing uses it afterwards

    def __init__(
        self,
        size: str = "small",
        d_model: int | None = None,
        d_ff: int | None = None,
        num_layers: int | None = None,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        head_width: int | None = None,
        vocab_size: int | None = None,
        tied_embeddings: bool | None = None,
        num_experts: int | None = None,
        experts_per_token: int | None = None,
        fp8: bool = False,
        attention: str = "sdpa",
        activation_checkpointing: bool = False,
        checkpoint_every: int | list[int] | None = None,
        compile: bool = False,  # noqa: A002 - the option's name on the command line
        compile_mode: str | None = None,
        loss: LossName = "plain",
        optimizer: str = "adamw",
        lr: float = 3e-4,
        weight_decay: float = 0.01,
        fused: bool | None = None,
        shard_optimizer_states: bool = False,
        metrics: bool = False,
    ) -> None:
        super().__init__()
        self.size = size
        # This checks the dimensions before any weight exists.
        self.config = preset(
            size,
            d_model=d_model,
            d_ff=d_ff,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_width=head_width,
            vocab_size=vocab_size,
            tied_embeddings=tied_embeddings,
            num_experts=num_experts,
            experts_per_token=experts_per_token,
            fp8=fp8,
            attention=attention,
            activation_checkpointing=activation_checkpointing,
            checkpoint_every=_as_tuple(checkpoint_every),
        )
        # a function that cannot be imported is refused before any weight exists
        attention_function(attention)
        self.vocab_size = self.config.vocab_size  # the data asks for it here
        # `compile` is a method of nn.Module, and `optimizers` one of Lightning's: hence the longer names.
        self.compile_model = compile
        self.compile_mode = compile_mode
        self.loss_name: LossName = loss
        self.optimizer_name = optimizer
        self.lr = lr
        self.weight_decay = weight_decay
        self.fused = fused
        self.shard_optimizer_states = shard_optimizer_states
        self.metrics = KeptMetrics() if metrics else None
        check_name(optimizer)
        expect_one_of(get_args(LossName), "loss", loss)
        has_logits = loss == "plain"
        expect(
            has_logits or not metrics,
            "metrics",
            "false with loss=chunked, which keeps no logits",
            metrics,
        )
        if compile_mode is not None:
            check_compile_mode(compile_mode, "compile_mode")
        expect(lr >= 0, "lr", "zero or more", lr)
        expect(weight_decay >= 0, "weight_decay", "zero or more", weight_decay)

    def setup(self, stage: str) -> None:
        """Check that the precision can be trained; make metrics combine the batches of all ranks."""
        if stage == "fit":
            self.check_precision()
        elif self.config.fp8:
            expect_fp8(self.trainer.strategy)
        if self.metrics is None:
            return
        for metric in self.metrics.values():
            # Each logged value covers all ranks' batches.
            metric.dist_sync_on_step = self.trainer.world_size > 1  # type: ignore[assignment]

    def to(self, *args: Any, **kwargs: Any) -> LanguageModel:
        """Move the module to a device or convert it to a dtype, as a Trainer does, but not its metrics to a dtype."""
        super().to(*args, **kwargs)
        if self.metrics is not None:
            self.metrics.keep_float32()
        return self

    def cpu(self) -> LanguageModel:
        """Move the module to the CPU, as a Trainer does when it is done with it, unless it ``stays``."""
        if not self.stays:
            super().cpu()
        return self

    def check_precision(self) -> None:
        """Raise UsageError for an optimizer that this Trainer's strategy or precision cannot use."""
        plugin = self.trainer.precision_plugin
        has_optimizer = self.optimizer_name != NO_OPTIMIZER
        self._check_sharing_of_states()
        if self.config.fp8:
            expect_fp8(self.trainer.strategy)
        if self.optimizer_name == MUON:
            self._check_muon()
        has_scaler = getattr(plugin, "scaler", None) is not None
        expect(
            has_optimizer or not has_scaler,
            "model.optimizer",
            f"adamw, sgd or muon with precision {plugin.precision}, whose gradient scaler needs an optimizer",
            self.optimizer_name,
        )
        clips_by_norm = self.trainer.gradient_clip_algorithm in (
            None,
            GradClipAlgorithmType.NORM,
        )
        clips_by_norm = clips_by_norm and has_optimizer and self._clips()
        expect(
            not (clips_by_norm and isinstance(plugin, FSDPPrecision)),
            "trainer.gradient_clip_val",
            "none with fsdp, which cannot clip by norm; fsdp2 can, and --trainer.gradient_clip_algorithm=value",
            self.trainer.gradient_clip_val,
        )

    def _check_sharing_of_states(self) -> None:
        """Raise UsageError if the optimizer's states are to be shared out, and the strategy cannot do that."""
        strategy = self.trainer.strategy
        # A plan of DDP rehearses a strategy for one device, which knows the number of devices.
        is_rehearsal_of_ddp = getattr(strategy, "world_size", 1) > 1 and isinstance(
            strategy, SingleDeviceStrategy
        )
        can_shard = is_rehearsal_of_ddp or isinstance(strategy, DDPStrategy)
        expect(
            can_shard or not self.shard_optimizer_states,
            "model.shard_optimizer_states",
            "processes that hold all parameters (--trainer.devices=2 --trainer.strategy=ddp)",
            type(strategy).__name__,
        )

    def _check_muon(self) -> None:
        """Raise UsageError if matrices are split, which Muon's update needs whole."""
        expect(
            not self.shard_optimizer_states,
            "model.optimizer",
            "adamw or sgd with shard_optimizer_states, since Muon's update needs whole matrices",
            self.optimizer_name,
        )
        expect(
            not isinstance(self.trainer.precision_plugin, FSDPPrecision),
            "model.optimizer",
            "adamw or sgd with fsdp, which flattens the matrices that Muon needs; fsdp2 does not",
            self.optimizer_name,
        )

    def _clips(self) -> bool:
        return (self.trainer.gradient_clip_val or 0) > 0

    def configure_model(self) -> None:
        """Make the Transformer, sharded and compiled as the options request."""
        # In this hook the strategy decides device, dtype and sharding. Lightning calls it once for each verb.
        if hasattr(self, "model"):
            return
        self.model = Transformer(self.config)
        if self.device_mesh is not None:
            shard_blocks(self.model, self.device_mesh)
        if self.compile_model:
            self.model.compile(mode=self.compile_mode)

    def configure_optimizers(self) -> Optimizer | None:
        """Return the chosen optimizer, fused if that is possible, with its states shared out if requested.

        None without an optimizer.
        """
        if self.optimizer_name == NO_OPTIMIZER:
            return None
        fused = self.fused
        if fused is None:
            # Lightning refuses to clip for a fused optimizer (2.6.6: MixedPrecision.clip_gradients).
            is_refused = self._clips() and isinstance(
                self.trainer.precision_plugin, MixedPrecision
            )
            fused = (
                next(self.parameters()).device.type in FUSED_DEVICES and not is_refused
            )
        if self.optimizer_name == MUON:
            matrices, other_parameters = split_parameters(self.model)
            return MuonWithAdamW(
                matrices,
                other_parameters,
                self.lr,
                self.weight_decay,
                fused=fused or None,
            )
        chosen_class = optimizer_class(self.optimizer_name)
        options = optimizer_options(chosen_class, self.lr, self.weight_decay)
        if self.optimizer_name in NAMES:
            # Where not fused, None leaves torch its default: foreach on CUDA, a loop over parameters on the CPU.
            options["fused"] = fused or None
        # A single process, as in a search for slow batches, keeps all states.
        if self.shard_optimizer_states and torch.distributed.is_initialized():
            from torch.distributed.optim import ZeroRedundancyOptimizer

            return ZeroRedundancyOptimizer(
                self.parameters(), optimizer_class=chosen_class, **options
            )
        return chosen_class(self.parameters(), **options)

    def optimizer_zero_grad(
        self, epoch: int, batch_idx: int, optimizer: Optimizer
    ) -> None:
        """Clear the gradients, even without an optimizer, because Lightning's stand-in would let them add up."""
        if self.optimizer_name == NO_OPTIMIZER:
            self.zero_grad()
        else:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        """Clip by the Trainer's options, but not without an optimizer: Lightning's stand-in holds no gradients."""
        if self.optimizer_name != NO_OPTIMIZER:
            super().configure_gradient_clipping(*args, **kwargs)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        logits_BTV: Tensor = self.model(tokens_BT)
        return logits_BTV

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean cross-entropy over all tokens of the batch, in nats."""
        return self._loss(batch, "train")

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self._loss(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self._loss(batch, "test")

    def _loss(self, batch: Batch, stage: str) -> Tensor:
        """Return the mean loss of ``batch``, and log the metrics of ``stage``."""
        inputs_BT, targets_BT = batch
        if self.loss_name == "chunked":  # refused together with metrics
            chunked_loss: Tensor = self.model(inputs_BT, targets_BT)
            return chunked_loss
        logits_BTV = self.forward(inputs_BT)
        with code_parts.part("loss"):
            loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
        # Our own copies of the module log nothing: they have no Trainer, or fake tensors without values.
        if self.metrics is not None and type(loss) is Tensor and self._is_attached():
            self.metrics.log(self, stage, loss, logits_BTV, targets_BT)
        return loss

    def _is_attached(self) -> bool:
        """Return whether a Trainer runs this module."""
        try:
            return self.trainer is not None
        except RuntimeError:  # what Lightning raises if there is no Trainer
            return False

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.forward(batch[0])

    def tokens_in(self, batch: Batch) -> int:
        return batch[0].numel()

    def expert_load(self) -> list[list[int]]:
        """Return how many tokens each expert of each block has received in training; empty without experts."""
        loads = []
        for part in self.model.modules():
            if isinstance(part, Experts):
                loads.append(part.load_X.tolist())
        return loads
