"""Report an error in the options of a call in one or two lines: subject, expected, given, remedy.

jsonargparse reports the option, the value and the type only as text, so patterns extract them. If no pattern matches,
the text is shown unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from lm_profiler.usage_error import UsageError, closest

_UNKNOWN_OPTION = "unknown option --"  # the beginning of the message about an option that does not exist


def unknown_option(option: str, names: Iterable[str]) -> UsageError:
    """Return the error about an unknown option; it proposes the closest of ``names``, the options that exist."""
    name = nearest(option, names)
    remedy = "see --help" if name is None else f"did you mean --{name}?"
    return UsageError(f"{_UNKNOWN_OPTION}{option}; {remedy}")


def check_dashes(word: str) -> None:
    """Raise UsageError if a ``word`` that belongs to no option starts with a single dash, like a mistyped option."""
    if word.startswith("-") and word != "-":
        raise UsageError(
            f"{word[:100]}: expected two dashes before an option; write -{word[:100]}"
        )


def nearest(option: str, names: Iterable[str]) -> str | None:
    """Return the most similar name: to the whole ``option``, or else to its last part, or else to its first; or None.

    >>> options = ["model.size", "data.batch_size", "name"]
    >>> nearest("nme", options), nearest("size", options), nearest("modle.width", options)
    ('name', 'model.size', 'model')
    """
    # In reverse order, so that of several options with the same last part the alphabetically first is kept.
    names = sorted({*names} - {""}, reverse=True)
    name = closest(option, names)
    if name is not None:
        return name

    by_last_part = {name.rpartition(".")[2]: name for name in names}
    last_part = option.rpartition(".")[2]
    similar_part = closest(last_part, by_last_part)
    if similar_part is not None:
        return by_last_part[similar_part]

    first_part, dot, _ = option.partition(".")
    first_parts = {name.partition(".")[0] for name in names}
    if not dot or first_part in first_parts:
        return None
    return closest(first_part, first_parts)


def message_in(output: str) -> str:
    """Return the message of a wrong call from the ``output`` of its process."""
    return output.rpartition("lm_profiler: ")[2].strip()


# -- jsonargparse's sentences ------------------------------------------------------------------------------------------

_KEY = re.compile(r'Parser key "([^"]+)"')
_UNKNOWN = re.compile(
    r"unknown option --([^\s;]+);|(?:arguments: --|[Oo]ption ')([^\s=']+)"
)
_NO_VALUE = re.compile(
    r"argument (?:-\w/)?--([\w.]+): expected (?:one|at least one) argument"
)
_GIVEN_VALUE = re.compile(r"Given value: (.*)", re.DOTALL)  # at the end of a message
_GOT_VALUE = re.compile(r"Got value: (.*)")  # at the end of a line
_TYPE = re.compile(r"<class '(?:[\w.]+\.)?(\w+)'>|typing\.Literal\[(.*)\]")
_SUBCLASS = re.compile(r"Not a valid subclass of (\w+)")
_NO_TEXT = re.compile(r"argument of type '\w+' is not iterable")  # wrong class_path
_OWN_MESSAGE = re.compile(r"[\w.]+: expected ")  # a message of our own classes
# Lines of a message that do not help the user. For a union of types, only the expected types help.
_NOISE = (
    "Parser key", "Does not validate", "Subtypes:", "Errors:", "Given value", "Expected a path", "Expected a dot",
    "Subclass types expect", "a class path (str)", "a dict with", "a dict without",
)  # fmt: skip
_SEQUENCE_TYPES = {"list", "Iterable", "Sequence"}
_MAX_VALUE_CHARACTERS = 200
_MAX_MESSAGE_CHARACTERS = 300  # for a message that is shown unchanged


def wrong_call(error: Exception, prefix: str = "") -> UsageError:
    """Return ``error`` as a UsageError, with a message of the parser in our words."""
    if isinstance(error, UsageError):
        return error
    return explain(str(error) or repr(error), prefix=prefix)


def explain(message: str, names: Iterable[str] = (), prefix: str = "") -> UsageError:
    """Return jsonargparse's ``message``, which may have many lines, as an error with subject, expected and given.

    ``names`` are the options that exist. ``prefix`` is the subject if the message does not name one.
    """
    # For an error in a config file, the message begins with the option that names the file.
    message = re.sub(r'^Parser key "\w+": ', "", message)
    subject = _option_of_message(message, prefix)
    without_value = _NO_VALUE.search(message)
    if without_value is not None:
        return UsageError(f"{without_value[1]}: expected a value, given none")
    unknown = _UNKNOWN.search(message)
    if unknown is not None:
        option_of_class, option = unknown.groups()
        if option_of_class:
            option = option_of_class
        if option_of_class and subject:
            option = f"{subject}.{option}"
        return unknown_option(option, names)

    lines = _useful_lines(message)
    # the lines that do more than name an expected type
    reasons = [line for line in lines if not line.startswith("Expected a")]
    for reason in reasons:
        if not _OWN_MESSAGE.match(reason):
            continue
        # The message of one of our classes is complete, except that it lacks the section of the option.
        names_subject = not subject or reason.startswith(f"{subject}.")
        if not names_subject:
            reason = f"{subject}.{reason}"
        return UsageError(reason)
    if reasons or not lines:
        text = " ".join(reasons)[:_MAX_MESSAGE_CHARACTERS]
        if subject:
            text = f"{subject}: {text}"
        return UsageError(text)
    return UsageError(f"{subject}: {_expected_and_given(lines, message)}")


def _option_of_message(message: str, prefix: str) -> str:
    """Return the option that a message of jsonargparse is about, in the spelling of the command line."""
    match = _KEY.search(message)
    if match is None:
        return prefix
    return match[1].replace("init_args.", "").removesuffix("_")


def _useful_lines(message: str) -> list[str]:
    """Return those lines of a message that state the error; the names of types in them are shortened.

    jsonargparse lists what each type of a union expects as a tree of lines, and then the value that was given.
    """
    lines = []
    tree = message.rpartition("Given value: ")[0] or message
    for line in tree.splitlines():
        line = line.partition(". Got value")[0].strip().removeprefix("- ")
        line = _TYPE.sub(r"\1\2", line)
        line = _SUBCLASS.sub(r"Expected a class path of \1", line)
        line = _NO_TEXT.sub("Expected a class path", line)
        if line and not line.startswith(_NOISE):
            lines.append(line)
    return lines


def _expected_and_given(lines: Sequence[str], message: str) -> str:
    """Return the text ``expected TYPES, given VALUE``.

    Each of ``lines`` names a type, as in ``Expected a list``; the ``message`` of jsonargparse contains the value.
    """
    types: list[str] = []
    for line in lines:
        expected_type = re.sub(r"^Expected an? ", "", line).replace("NoneType", "null")
        if expected_type not in types:
            types.append(expected_type)
    match = _GIVEN_VALUE.search(message) or _GOT_VALUE.search(message)
    value = match[1].strip()[:_MAX_VALUE_CHARACTERS] if match else ""
    takes_class = any(name.startswith("class path") for name in types)
    takes_list = not _SEQUENCE_TYPES.isdisjoint(types)
    remedy = ""
    if takes_class and not takes_list and value.startswith("[{"):
        remedy = "; leave out the list around it"
    return f"expected {' or '.join(types)}, given {value!r}{remedy}"
