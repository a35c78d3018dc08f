"""The base class of records and their parts, and how their files are read, also those of other versions."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticSerializationError

from lm_profiler.record.figure import figure
from lm_profiler.record.files import RecordError, read_json, write_whole

if sys.version_info >= (3, 11):
    from typing import dataclass_transform
else:
    from typing_extensions import dataclass_transform

# the version of every file's format; ``docs/reference/files.md`` says what may be added without a new number
SCHEMA_VERSION = 1


def _known_or_newer(word: Any, known: ValidatorFunctionWrapHandler) -> Any:
    try:
        return known(word)
    except ValidationError:
        if isinstance(word, str):
            return word
        raise


# marks a field that holds one of some words: a word that a later version may have added is kept as it is
Newer = WrapValidator(_known_or_newer)


@dataclass_transform(kw_only_default=True, field_specifiers=(Field, figure))
class Part(BaseModel):
    """An immutable part of a record. Reading ignores fields that a later version may have added."""

    # Validators are built where they are first used: most processes that import these write or read no record.
    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)

    def write(self, path: Path, private: bool = False) -> None:
        """Write this part as JSON to ``path``, readable by its owner only if ``private``."""
        write_whole(path, json_of(self, indent=1) + "\n", private)


def json_of(model: BaseModel, indent: int | None = None) -> str:
    """Return ``model`` as JSON; lone surrogates, which command lines and messages may have, become question marks."""
    try:
        return model.model_dump_json(indent=indent)
    except PydanticSerializationError:  # pydantic writes UTF-8 and refuses lone surrogates
        text = json.dumps(model.model_dump(mode="json"), ensure_ascii=False, indent=indent)
        return text.encode("utf-8", "replace").decode()


P = TypeVar("P", bound=Part)


def read_as(path: Path, form: type[P], what: str) -> P:
    """Read a ``form`` from the JSON in ``path``; messages call it ``what``."""
    try:
        content = read_json(path)
        version = content.get("schema_version") if isinstance(content, dict) else None
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise RecordError(
                f"{path}: expected {what} of version {SCHEMA_VERSION} of the format, given version {version}, "
                "which a later lm_profiler wrote; pip install --upgrade lm_profiler"
            )
        return form.model_validate(content)
    except UnicodeDecodeError:
        raise RecordError(f"{path}: is not text") from None
    except RecordError:
        raise
    except ValueError as error:
        raise RecordError(f"{path}: not {what} of version {SCHEMA_VERSION}: {_why_not(error)}") from None


def _why_not(error: ValueError) -> str:
    if not isinstance(error, ValidationError):  # no JSON, or figures that are none
        return f"file: {error}"
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'file'}: {first['msg'].removeprefix('Value error, ')}"
