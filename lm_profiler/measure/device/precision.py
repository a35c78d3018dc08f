"""Reads and restores the precision of float32 matmuls, which torch keeps in two different settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")

# the older setting's words for those of the newer one
_WORDS = {"ieee": "highest", "none": "highest", "tf32": "high", "bf16": "medium"}


def float32_matmul_precision(device_type: str = "cuda") -> str:
    """Return ``highest``, ``high`` (TF32) or ``medium`` (bf16): the precision of float32 matmuls on ``device_type``.

    ``torch.get_float32_matmul_precision()`` raises once the setting that torch 2.9 introduced was used
    (``torch.backends.cuda.matmul.fp32_precision``); then that one is read. "unknown" if its word is new.
    """
    told = _told(torch.get_float32_matmul_precision)
    if told is not None:
        return told
    backends: Any = torch.backends  # which torch types in part
    products = backends.mkldnn.matmul if device_type == "cpu" else backends.cuda.matmul
    return _WORDS.get(products.fp32_precision, "unknown")


@dataclass(frozen=True)
class Switches:
    """The precision settings of this process, as plain values that can be copied and pickled."""

    products: str | None
    convolutions: bool | None
    operators: tuple[str, ...]

    @classmethod
    def now(cls) -> Switches:
        """Read the current settings."""
        convolutions = _told(lambda: torch.backends.cudnn.allow_tf32)
        each = tuple(operator.fp32_precision for operator in operators_with_precision())
        return cls(_told(torch.get_float32_matmul_precision), convolutions, each)

    def restore(self) -> None:
        """Restore both matmul-precision settings and cuDNN's."""
        if self.products is not None:
            torch.set_float32_matmul_precision(self.products)
        if self.convolutions is not None:
            torch.backends.cudnn.allow_tf32 = self.convolutions
        for operator, before in zip(operators_with_precision(), self.operators, strict=True):
            operator.fp32_precision = before


def operators_with_precision() -> list[Any]:
    """Return the objects of ``torch.backends`` that have a float32 precision of their own."""
    libraries: Any = torch.backends
    cuda, cudnn, mkldnn = libraries.cuda, libraries.cudnn, libraries.mkldnn
    return [cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn]


def _told(switch: Callable[[], _T]) -> _T | None:
    """Return the value of an older setting; None where the newer one was used, as the older one then raises."""
    try:
        return switch()
    except RuntimeError:
        return None
