"""Loss and perplexity, kept as a real training keeps them."""

from __future__ import annotations

from collections.abc import Callable

from lightning.pytorch import LightningModule
from torch import Tensor, nn

_STAGES = ("train", "val", "test")


class KeptMetrics(nn.ModuleDict):
    """``train_loss`` (``MeanMetric``) and ``train_perplexity`` (``text.Perplexity``), for ``self.log``; of ``val`` and
    ``test`` too.

    With several ranks the logged value of each step is that of the batches of all of them: torchmetrics updates each
    metric twice a step then, and sends its states from rank to rank.
    """

    def __init__(self) -> None:
        from torchmetrics import MeanMetric  # half a second, and rarely needed
        from torchmetrics.text import Perplexity

        kinds: dict[str, Callable[[], nn.Module]] = {"loss": MeanMetric, "perplexity": Perplexity}
        # Made in no Trainer's dtype: in bfloat16 they would count no further than 256.
        super().__init__({f"{stage}_{name}": kind() for stage in _STAGES for name, kind in kinds.items()})

    def agree(self, ranks: int) -> None:
        """Let each step's values be those of all ``ranks``."""
        for metric in self.values():
            metric.dist_sync_on_step = ranks > 1  # type: ignore[assignment]

    def log(self, module: LightningModule, stage: str, loss: Tensor, logits_BTV: Tensor, targets_BT: Tensor) -> None:
        """Update what is kept of ``stage``, and log it as ``module``'s.

        The perplexity is exp of the mean cross-entropy of a token, in float32 whatever the logits are.
        """
        self[f"{stage}_loss"](loss.detach())
        self[f"{stage}_perplexity"](logits_BTV.detach().float(), targets_BT)
        for name in (f"{stage}_loss", f"{stage}_perplexity"):
            module.log(name, self[name])  # type: ignore[arg-type]
