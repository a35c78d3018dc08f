"""Language models: after nanoGPT, and Hugging Face's own from their configurations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset

VOCABULARY, CONTEXT, WIDTH = 512, 64, 64


class Ids(Dataset[dict[str, Tensor]]):
    """Rows of token ids, of equal or varying length."""

    def __init__(self, rows: int = 256, varying: bool = False) -> None:
        made = torch.Generator().manual_seed(1)
        lengths = (
            torch.randint(8, CONTEXT, (rows,), generator=made).tolist()
            if varying
            else [CONTEXT] * rows
        )
        self.rows = [
            torch.randint(1, VOCABULARY, (n,), generator=made) for n in lengths
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[at], "labels": self.rows[at].clone()}


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch as tokenizers pad it."""
    ids = pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    labels = pad_sequence(
        [row["labels"] for row in rows], batch_first=True, padding_value=-100
    )
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )
        self.register_buffer(
            "bias",
            torch.tril(torch.ones(CONTEXT, CONTEXT)).view(1, 1, CONTEXT, CONTEXT),
        )

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (
            part.view(b, t, self.heads, c // self.heads).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).split(c, 2)
        )
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        att = F.dropout(F.softmax(att, dim=-1), self.dropout, self.training)
        x = x + self.c_proj((att @ v).transpose(1, 2).contiguous().view(b, t, c))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(LightningModule):
    """Tied head, groups with and without decay, a lambda of warm-up; the norm of gradients is logged."""

    def __init__(
        self,
        layers: int = 3,
        heads: int = 4,
        lr: float = 3e-4,
        warmup: int = 10,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.wte, self.wpe = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Embedding(CONTEXT, WIDTH),
        )
        self.blocks = nn.ModuleList(Block(WIDTH, heads, dropout) for _ in range(layers))
        self.ln_f, self.lm_head = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, VOCABULARY, bias=False),
        )
        self.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for name, weight in self.named_parameters():
            if name.endswith("c_proj.weight"):
                torch.nn.init.normal_(
                    weight, mean=0.0, std=0.02 / math.sqrt(2 * layers)
                )
        print(
            f"number of parameters: {sum(p.numel() for p in self.parameters()) / 1e6:.2f}M"
        )

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def train_dataloader(self) -> Any:
        return DataLoader(Ids(), batch_size=8, shuffle=True, num_workers=0)

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.ln_f(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.lm_head(self.hidden(batch["input_ids"]))
        loss = F.cross_entropy(
            logits[:, :-1].reshape(-1, VOCABULARY),
            batch["labels"][:, 1:].reshape(-1),
            ignore_index=-100,
        )
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/perplexity", torch.exp(loss).item())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [
            p.grad.detach().norm(2) for p in self.parameters() if p.grad is not None
        ]
        total_norm = torch.stack(norms).norm(2).item()
        self.log("grad_norm", total_norm)

    def configure_optimizers(self) -> Any:
        decay = [p for p in self.parameters() if p.dim() >= 2]
        rest = [p for p in self.parameters() if p.dim() < 2]
        groups = [
            {"params": decay, "weight_decay": 0.1},
            {"params": rest, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr, betas=(0.9, 0.95))
        warmup = self.hparams.warmup
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / warmup)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class VaryingLengths(NanoGPT):
    """Every batch is padded to its longest row."""

    def train_dataloader(self) -> Any:
        return DataLoader(Ids(varying=True), batch_size=8, collate_fn=padded)


class Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            ids = torch.randint(1, VOCABULARY, (CONTEXT,))
            yield {"input_ids": ids, "labels": ids}


class StreamData(LightningDataModule):
    """Holds another data module, as mixtures do."""

    def __init__(self, inner: LightningDataModule | None = None) -> None:
        super().__init__()
        self.inner, self.vocab_size = inner, VOCABULARY

    def setup(self, stage: str) -> None:
        self.data = Stream()

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=8, collate_fn=padded)


class Nested(LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.parts = StreamData(StreamData())

    def setup(self, stage: str) -> None:
        self.parts.setup(stage)

    def train_dataloader(self) -> Any:
        return {
            "a": self.parts.train_dataloader(),
            "b": DataLoader(Ids(), batch_size=4),
        }


class AsksItsData(NanoGPT):
    """Two loaders of a nested data module, asked for its size."""

    def configure_model(self) -> None:
        self.size = self.trainer.datamodule.parts.vocab_size

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.trainer.datamodule.parts.vocab_size == self.size
        return super().training_step(batch["a"], batch_idx) + super().training_step(
            batch["b"], batch_idx
        )


class Checkpointed(NanoGPT):
    """Both kinds of checkpointing."""

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.size(1), device=ids.device))
        for at, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=bool(at % 2))
        return self.ln_f(x)


class Offloads(NanoGPT):
    """What is saved for backward is packed by hooks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(
            self.pack,
            lambda packed: packed.float() if packed.dtype is torch.bfloat16 else packed,
        ):
            x = self.hidden(batch["input_ids"])
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), batch["labels"].flatten())

    def pack(self, tensor: Tensor) -> Tensor:
        return (
            tensor.to(torch.bfloat16)
            if tensor.is_floating_point() and not isinstance(tensor, nn.Parameter)
            else tensor
        )


class HalfCompiled(NanoGPT):
    """A part is compiled: the same step is planned without."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_f = torch.compile(self.ln_f)


class TorchEncoder(LightningModule):
    """After PyTorch's word_language_model, of torch's own layers: they call attention and dropout themselves."""

    def __init__(
        self, width: int = 256, heads: int = 4, layers: int = 4, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.embed, self.head = (
            nn.Embedding(VOCABULARY, width),
            nn.Linear(width, VOCABULARY),
        )
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers)

    def train_dataloader(self) -> Any:
        return DataLoader(Ids(), batch_size=8)

    def hidden(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(
            ids.size(1), device=ids.device
        )
        return self.encoder(self.embed(ids), mask=mask, is_causal=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.head(self.hidden(batch["input_ids"]))
        return F.cross_entropy(
            logits[:, :-1].reshape(-1, VOCABULARY), batch["labels"][:, 1:].reshape(-1)
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class TorchAttention(TorchEncoder):
    """Attention alone, which gives out its weights, as it does where nobody says otherwise."""

    def __init__(
        self, width: int = 256, heads: int = 4, layers: int = 4, dropout: float = 0.1
    ) -> None:
        super().__init__(width, heads, layers, dropout)
        self.encoder = nn.ModuleList(
            nn.MultiheadAttention(width, heads, dropout, batch_first=True)
            for _ in range(layers)
        )

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for attention in self.encoder:
            x = x + attention(x, x, x)[0]
        return x


class HuggingFace(LightningModule):
    """Fine-tuning as their course has it."""

    def __init__(self, kind: str = "gpt2", lr: float = 5e-5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = self.made(kind)

    def made(self, kind: str) -> nn.Module:
        import transformers as hf

        small = {
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        wide = {"intermediate_size": 128, "max_position_embeddings": CONTEXT}
        if kind == "gpt2":
            return hf.GPT2LMHeadModel(
                hf.GPT2Config(
                    vocab_size=VOCABULARY,
                    n_positions=CONTEXT,
                    n_embd=WIDTH,
                    n_layer=2,
                    n_head=4,
                )
            )
        if kind == "llama":
            return hf.LlamaForCausalLM(
                hf.LlamaConfig(**small, **wide, num_key_value_heads=2)
            )
        if kind == "bert":
            return hf.BertForMaskedLM(hf.BertConfig(**small, **wide))
        if kind == "t5":
            shape = {
                "d_model": WIDTH,
                "d_ff": 128,
                "d_kv": 16,
                "num_layers": 2,
                "num_heads": 4,
            }
            return hf.T5ForConditionalGeneration(
                hf.T5Config(vocab_size=VOCABULARY, **shape, decoder_start_token_id=0)
            )
        if kind == "bart":
            shape = {
                f"{part}_{name}": n
                for part in ("encoder", "decoder")
                for name, n in (("layers", 2), ("ffn_dim", 128), ("attention_heads", 4))
            }
            return hf.BartForConditionalGeneration(
                hf.BartConfig(
                    vocab_size=VOCABULARY,
                    max_position_embeddings=CONTEXT,
                    d_model=WIDTH,
                    **shape,
                )
            )
        return hf.MixtralForCausalLM(
            hf.MixtralConfig(
                **small, **wide, num_key_value_heads=2, num_local_experts=4
            )
        )

    def train_dataloader(self) -> Any:
        return DataLoader(Ids(varying=True), batch_size=8, collate_fn=padded)

    def forward(self, **batch: Tensor) -> Any:
        return self.model(**batch)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        outputs = self(**batch)
        self.log("train_loss", outputs.loss, on_step=True, on_epoch=True)
        return outputs.loss

    def configure_optimizers(self) -> Any:
        from transformers import get_linear_schedule_with_warmup

        no_decay = ["bias", "LayerNorm.weight"]
        groups = [
            {
                "params": [
                    p
                    for n, p in self.model.named_parameters()
                    if not any(nd in n for nd in no_decay)
                ],
                "weight_decay": 0.01,
            },
            {
                "params": [
                    p
                    for n, p in self.model.named_parameters()
                    if any(nd in n for nd in no_decay)
                ],
                "weight_decay": 0.0,
            },
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr, eps=1e-8)
        steps = self.trainer.estimated_stepping_batches
        scheduler = get_linear_schedule_with_warmup(
            optimizer, num_warmup_steps=5, num_training_steps=steps
        )
        return [optimizer], [
            {"scheduler": scheduler, "interval": "step", "frequency": 1}
        ]


class LoRALinear(nn.Module):
    """A frozen weight in eight bits, and two small ones that are trained."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        scale = base.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer(
            "weight", (base.weight.detach() / scale).round().to(torch.int8)
        )
        self.register_buffer("scale", scale)
        self.a, self.b = (
            nn.Parameter(torch.randn(rank, base.in_features) * 0.01),
            nn.Parameter(torch.zeros(base.out_features, rank)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return (
            F.linear(x, self.weight.to(x.dtype) * self.scale) + x @ self.a.T @ self.b.T
        )


class LoRA(NanoGPT):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.c_attn, block.c_proj = (
                LoRALinear(block.c_attn),
                LoRALinear(block.c_proj),
            )
        trained = sum(p.numel() for p in self.parameters() if p.requires_grad)
        print(
            f"trainable: {trained} ({100 * trained / sum(p.numel() for p in self.parameters()):.2f}%)"
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(
            filter(lambda p: p.requires_grad, self.parameters()), lr=1e-3
        )
