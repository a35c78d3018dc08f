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

_NAME = re.compile(
    r"(^|[_.-])(key|keys|apikeys?|token|passwords?|passwd|pwd|passphrase|secrets?|credentials?|authorization|cookie)$"
)
# names of tokenizers' and loaders' options, which are not secret
_NO_NAME = re.compile(r"(^|[_.-])((bos|eos|pad|unk|mask|sep|cls|image|special|next|per)_token|(sort|batch)_key)$")

_IN_ADDRESS = re.compile(r"(?<=://)[^/\s@'\"]+(?=@)")
_IN_QUERY = re.compile(r"(?i)([?&][\w.-]*(?:token|key|secret|password|signature|sig|credential)=)[^&\s'\"#]+")
_MARKED = re.compile(
    r"\b(?:gh[opsu]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_\w{20,}|sk-[\w-]{20,}|xox[abprs]-[\w-]{10,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{35}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)"
)

_NO_SECRETS = ("", "null", "~", "true", "false")


def is_secret(name: str) -> bool:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return _NAME.search(words) is not None and _NO_NAME.search(words) is None


def masked(value: Any, name: str = "") -> Any:
    """Return ``value`` of the option ``name`` without secrets; it may be nested in lists and mappings."""
    if isinstance(value, Mapping):
        return {key: masked(below, name if is_secret(name) else str(key)) for key, below in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked(below, name) for below in value]
    if value is None or isinstance(value, bool) or value == "":
        return value
    if is_secret(name):
        return MASK
    return masked_text(value) if isinstance(value, str) else value


def masked_line(words: Iterable[str]) -> list[str]:
    """Return the ``words`` of a command line without secrets, also those nested in YAML."""
    shown, last = [], ""
    for word in words:
        if not word.startswith("--"):
            shown.append(masked_option(last, word))
            continue
        name, equals, value = word.partition("=")
        shown.append(name + equals + masked_option(name, value))
        last = "" if equals else name
    return shown


def masked_option(name: str, value: str) -> str:
    """Return the text ``value`` of an option without secrets; YAML that contains one is rewritten."""
    parsed: Any = value
    if ":" in value and not is_secret(name):
        with suppress(yaml.YAMLError, ValueError, RecursionError):
            parsed = yaml.safe_load(value)
    if not isinstance(parsed, (dict, list)):
        return MASK if is_secret(name) and value not in _NO_SECRETS else masked_text(value)
    shown = masked(parsed, name)
    return value if shown == parsed else str(yaml.safe_dump(shown, default_flow_style=True, width=10**6)).strip()


def holds_secret(words: Iterable[str]) -> bool:
    """Return whether one of ``words`` of a command line, or texts of a config, has a secret."""
    words = list(words)
    return masked_line(words) != words


def masked_text(text: str) -> str:
    """Return ``text``, an error's message for example, without values that have the form of a secret."""
    return _MARKED.sub(MASK, _IN_QUERY.sub(rf"\g<1>{MASK}", _IN_ADDRESS.sub(MASK, text)))
