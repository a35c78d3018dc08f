"""Replaces likely secrets among a call's options by stars before anything is written.

An option is secret by its name (``hf_token``, ``apiKey``, ``db.password``), or a value by its form: credentials within
an address, or a token whose issuer marks it (GitHub, GitLab, Hugging Face, OpenAI, Slack, AWS, Google, JSON Web Token).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import yaml

MASK = "***"

# The names of options that are secret.
_SECRET_NAME = re.compile(
    r"(^|[_.-])(key|keys|apikeys?|token|passwords?|passwd|pwd|passphrase|secrets?|credentials?|authorization|cookie)$"
)
# Names of tokenizers' and loaders' options, which look like those and are not secret.
_HARMLESS_NAME = re.compile(
    r"(^|[_.-])((bos|eos|pad|unk|mask|sep|cls|image|special|next|per)_token|(sort|batch)_key)$"
)

_CREDENTIALS_IN_ADDRESS = re.compile(r"(?<=://)[^/\s@'\"]+(?=@)")
_SECRET_IN_QUERY = re.compile(
    r"(?i)([?&][\w.-]*(?:token|key|secret|password|signature|sig|credential)=)[^&\s'\"#]+"
)
_ISSUED_TOKEN = re.compile(
    r"\b(?:gh[opsu]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_\w{20,}|sk-[\w-]{20,}|xox[abprs]-[\w-]{10,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{35}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)"
)

_HARMLESS_VALUES = ("", "null", "~", "true", "false")


def is_secret(name: str) -> bool:
    """Return whether an option of this ``name`` holds a secret, such as ``api_key`` or ``apiKey``."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()  # apiKey: api_key
    if _HARMLESS_NAME.search(words):
        return False
    return _SECRET_NAME.search(words) is not None


def mask(value: Any, name: str = "") -> Any:
    """Return ``value`` of the option ``name`` without secrets; it may be nested in lists and mappings."""
    if isinstance(value, Mapping):
        if is_secret(name):
            return {key: mask(item, name) for key, item in value.items()}
        return {key: mask(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mask(item, name) for item in value]
    if value is None or isinstance(value, bool) or value == "":
        return value
    if is_secret(name):
        return MASK
    if isinstance(value, str):
        return mask_text(value)
    return value


def mask_line(words: Iterable[str]) -> list[str]:
    """Return the ``words`` of a command line without secrets, also those nested in YAML."""
    masked_words = []
    option = ""  # the option whose value the next word is
    for word in words:
        if not word.startswith("--"):
            masked_words.append(mask_option(option, word))
            continue
        name, equals, value = word.partition("=")
        masked_words.append(name + equals + mask_option(name, value))
        has_value = bool(equals)
        option = "" if has_value else name
    return masked_words


def mask_option(name: str, value: str) -> str:
    """Return the text ``value`` of an option without secrets; YAML that contains one is rewritten."""
    if ":" in value and not is_secret(name):
        parsed: Any = None
        with suppress(yaml.YAMLError, ValueError, RecursionError):
            parsed = yaml.safe_load(value)
        if isinstance(parsed, (dict, list)):
            masked = mask(parsed, name)
            if masked == parsed:
                return value
            return str(
                yaml.safe_dump(masked, default_flow_style=True, width=10**6)
            ).strip()
    if is_secret(name) and value not in _HARMLESS_VALUES:
        return MASK
    return mask_text(value)


def has_secret(words: Iterable[str]) -> bool:
    """Return whether one of ``words`` of a command line, or texts of a config, has a secret."""
    words = list(words)
    return mask_line(words) != words


def mask_text(text: str) -> str:
    """Return ``text``, an error's message for example, without values that have the form of a secret."""
    text = _CREDENTIALS_IN_ADDRESS.sub(MASK, text)
    text = _SECRET_IN_QUERY.sub(rf"\g<1>{MASK}", text)
    return _ISSUED_TOKEN.sub(MASK, text)
