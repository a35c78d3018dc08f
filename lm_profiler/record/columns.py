"""Columns of numbers in a message between processes: base64 in JSON, of one declared type, and nothing else."""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray
from pydantic_core import core_schema


@dataclass(frozen=True)
class PackedArray:
    """How pydantic writes and reads an array of ``dtype``, with ``width`` values a row where it has rows of several.

    What is read has that type whatever was sent; text (``S16``) comes back as numpy's ``str_``.
    """

    dtype: DTypeLike
    width: int | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        text = core_schema.str_schema(strict=True)
        return core_schema.json_or_python_schema(
            json_schema=core_schema.no_info_after_validator_function(self.read, text),
            python_schema=core_schema.is_instance_schema(np.ndarray),
            serialization=core_schema.plain_serializer_function_ser_schema(self.written, when_used="json"),
        )

    def written(self, column: NDArray[Any]) -> str:
        """Return ``column`` as text."""
        return b64encode(np.ascontiguousarray(column, self.dtype).tobytes()).decode()

    def read(self, text: str) -> NDArray[Any]:
        """Return the array that ``written`` turned into ``text``."""
        flat = np.frombuffer(b64decode(text, validate=True), self.dtype)
        flat = flat.astype(np.str_) if flat.dtype.kind == "S" else flat
        return flat if self.width is None else flat.reshape(-1, self.width)


Counts = Annotated[NDArray[np.int64], PackedArray(np.int64)]
Codes = Annotated[NDArray[np.uint8], PackedArray(np.uint8)]
Reals = Annotated[NDArray[np.float64], PackedArray(np.float64)]
Words = Annotated[NDArray[np.str_], PackedArray("S16")]
