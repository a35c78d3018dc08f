"""A language model of transformers, built from its config (nothing is downloaded), on the bytes of a text file."""

from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, LlamaConfig

from lm_profiler.callbacks import profiling_callbacks

TEXT = Path(__file__).with_name("alice.txt")
CONTEXT, BATCH = 128, 4


class Bytes(Dataset[dict[str, Tensor]]):
    """Windows of a text; each byte is a token, so that no tokenizer is needed."""

    def __init__(self, text: Path) -> None:
        self.tokens = torch.frombuffer(
            bytearray(text.read_bytes()), dtype=torch.uint8
        ).long()

    def __len__(self) -> int:
        return len(self.tokens) - CONTEXT

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.tokens[index : index + CONTEXT]
        return {
            "input_ids": window,
            "labels": window,
        }  # the model shifts the labels itself


class CausalLM(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        shape = LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=CONTEXT,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.model = AutoModelForCausalLM.from_config(shape)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


def main() -> None:
    trainer = Trainer(
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
        # Tokens/s are those of `input_ids`.
        callbacks=profiling_callbacks(
            warmup_steps=3, measure_steps=10, name="hugging_face"
        ),
    )
    trainer.fit(CausalLM(), DataLoader(Bytes(TEXT), batch_size=BATCH, shuffle=True))


if __name__ == "__main__":
    main()
