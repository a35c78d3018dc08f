"""Writes records to files atomically, and reads files of any version; ``Part`` is the base class of records."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    WrapValidator,
)
from pydantic_core import PydanticSerializationError, from_json, to_jsonable_python
from typing_extensions import dataclass_transform

from lm_profiler.record.figure import figure

# The version of the format of all files. ``docs/reference/files.md`` lists the changes that need no new number.
SCHEMA_VERSION = 1


def real_path(path: Path) -> Path:
    """Return ``path`` with links followed, as far as it exists."""
    return Path(os.path.realpath(path))


def write_whole(path: Path, content: str | bytes, private: bool = False) -> None:
    """Write ``content`` (text as UTF-8) to a temporary file and rename it, so that readers never see half a file."""
    data = content.encode() if isinstance(content, str) else content
    target = real_path(path)
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return
    temporary = target.with_name(f".{target.name}.{token_hex(4)}")
    permissions = 0o600 if private else 0o666
    try:
        temporary.touch(permissions, exist_ok=False)
        temporary.write_bytes(data)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def claim_run_dir(parent: Path) -> Path:
    """Create the next free folder ``version_<n>`` in ``parent``, and return it."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 0
    for folder in parent.glob("version_*"):
        number_text = folder.name.removeprefix("version_")
        if number_text.isdecimal():
            number = max(number, int(number_text) + 1)
    while True:
        folder = parent / f"version_{number}"
        with suppress(FileExistsError):
            # if two runs start at the same time, mkdir succeeds only for one of them
            folder.mkdir()
            return folder
        number += 1


def relative_to_cwd(path: Path) -> Path:
    """Return ``path`` relative to the current folder, if it is within it."""
    try:
        return path.relative_to(Path.cwd())
    except (OSError, ValueError):
        # the current folder does not exist any more, or ``path`` is not within it
        return path


_ROOTS: ContextVar[list[Path] | None] = ContextVar("roots", default=None)


class RecordError(ValueError):
    """Raised if a file is missing, damaged or of another kind. The message names the file."""


@contextmanager
def restrict_reading(*roots: Path) -> Iterator[None]:
    """Within this context, this thread can read only files in ``roots``, also through links."""
    token = _ROOTS.set([real_path(root) for root in roots])
    try:
        yield
    finally:
        _ROOTS.reset(token)


def read_plain(path: Path) -> bytes:
    """Return the content of a file; raise RecordError if it cannot be read, or if this thread must not read it."""
    real = real_path(path)
    roots = _ROOTS.get()
    if roots is not None:
        is_allowed = any(real.is_relative_to(root) for root in roots)
        if not is_allowed:
            raise RecordError(f"{path}: cannot be read: it lies outside the folder")
    try:
        return real.read_bytes()
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from None


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; raise ValueError if it is not JSON, or has a number that is not finite."""
    return from_json(read_plain(path).decode("utf-8"), allow_inf_nan=False)


def _accept_newer_word(word: Any, validate: Callable[[Any], Any]) -> Any:
    """Return a validated ``word``; one that is not known is returned unchanged, since a later version may know it."""
    try:
        return validate(word)
    except ValidationError:
        if isinstance(word, str):
            return word
        raise


# For fields with a fixed set of words: a word that a later version may have added is kept unchanged.
Newer = WrapValidator(_accept_newer_word)


@dataclass_transform(kw_only_default=True, field_specifiers=(Field, figure))
class Part(BaseModel):
    """An immutable part of a record. Fields that a later version may have added are ignored when it is read."""

    # Validators are built when they are first used, because most processes neither read nor write records.
    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)

    def write(self, path: Path, private: bool = False) -> None:
        """Write this part as JSON to ``path``; if ``private``, only the owner can read the file."""
        write_whole(path, json_of(self, indent=1) + "\n", private)


def json_of(record: Any, indent: int | None = None) -> str:
    """Return a ``Part`` or a dataclass as JSON, with null for NaN and infinity.

    Lone surrogates, which may occur in command lines and messages, become question marks.
    """
    # before pydantic 2.14, to_json cannot handle a class whose validators are not built yet
    adapter = TypeAdapter[Any](type(record))
    try:
        return adapter.dump_json(record, indent=indent).decode()
    except PydanticSerializationError:
        # pydantic writes UTF-8 and refuses lone surrogates
        plain = to_jsonable_python(adapter.dump_python(record), inf_nan_mode="null")
        return (
            json.dumps(plain, ensure_ascii=False, indent=indent)
            .encode("utf-8", "replace")
            .decode()
        )


P = TypeVar("P", bound=Part)
T = TypeVar("T")


def read_part(path: Path, form: type[P], description: str) -> P:
    """Read a part of the class ``form`` from the JSON file ``path``; messages call it ``description``."""
    try:
        content = read_json(path)
        version = content.get("schema_version") if isinstance(content, dict) else None
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise RecordError(
                f"{path}: expected {description} of version {SCHEMA_VERSION} of the format, given version {version}, "
                "which a later lm_profiler wrote; pip install --upgrade lm_profiler"
            )
        return form.model_validate(content)
    except UnicodeDecodeError:
        raise RecordError(f"{path}: is not text") from None
    except RecordError:
        raise
    except ValueError as error:
        raise RecordError(
            f"{path}: not {description} of version {SCHEMA_VERSION}: {_problem_text(error)}"
        ) from None


def none_if_unreadable(
    read: Callable[..., T], *arguments: Any, problems: list[str] | None = None
) -> T | None:
    """Return what ``read`` returns; None if it raises RecordError, whose message is then added to ``problems``."""
    try:
        return read(*arguments)
    except RecordError as error:
        if problems is not None:
            problems.append(str(error))
        return None


def _problem_text(error: ValueError) -> str:
    """Return a text with the first invalid field, and the reason."""
    if not isinstance(error, ValidationError):  # not JSON, or wrong figures
        return f"file: {error}"
    details = error.errors()[0]
    field = ".".join(str(name) for name in details["loc"]) or "file"
    message = details["msg"].removeprefix("Value error, ")
    return f"{field}: {message}"
