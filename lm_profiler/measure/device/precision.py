"""In what float32 matrix products compute: torch's two switches, read as one, and put back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")

_WORDS = {"ieee": "highest", "none": "highest", "tf32": "high", "bf16": "medium"}
"""The newer switch's words in those of the older one."""


def float32_matmul_precision(device_type: str = "cuda") -> str:
    """``highest``, ``high`` (TF32) or ``medium`` (bf16): how this process multiplies float32 on ``device_type``.

    ``torch.get_float32_matmul_precision()`` refuses to answer once a part was set by the switch that torch 2.9 brought
    (``torch.backends.cuda.matmul.fp32_precision``); then that one is read. "unknown" for a word of it that is new.
    """
    told = _told(torch.get_float32_matmul_precision)
    if told is not None:
        return told
    backends: Any = torch.backends  # which torch types in part
    products = backends.mkldnn.matmul if device_type == "cpu" else backends.cuda.matmul
    return _WORDS.get(products.fp32_precision, "unknown")


@dataclass(frozen=True)
class Switches:
    """What this process was set to; ``restore`` sets it to that again. Plain values, so that it copies and pickles."""

    products: str | None
    convolutions: bool | None
    operators: tuple[str, ...]

    @classmethod
    def now(cls) -> Switches:
        """As they stand."""
        convolutions = _told(lambda: torch.backends.cudnn.allow_tf32)
        each = tuple(operator.fp32_precision for operator in operators_with_precision())
        return cls(_told(torch.get_float32_matmul_precision), convolutions, each)

    def restore(self) -> None:
        """Both switches of products, and cuDNN's."""
        if self.products is not None:
            torch.set_float32_matmul_precision(self.products)
        if self.convolutions is not None:
            torch.backends.cudnn.allow_tf32 = self.convolutions
        for operator, before in zip(operators_with_precision(), self.operators, strict=True):
            operator.fp32_precision = before


def operators_with_precision() -> list[Any]:
    """What has a float32 precision of its own."""
    libraries: Any = torch.backends
    cuda, cudnn, mkldnn = libraries.cuda, libraries.cudnn, libraries.mkldnn
    return [cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn]


def _told(switch: Callable[[], _T]) -> _T | None:
    """What the process is set to; None where single operators are, of which the older switches refuse to speak."""
    try:
        return switch()
    except RuntimeError:
        return None
