"""A misspelt word is answered with the right one; another word is not."""

import pytest

from lm_profiler.models.config import check_size_name
from lm_profiler.usage_error import UsageError, did_you_mean

DISTRIBUTIONS = ("uniform", "zipf")
FORMATS = ("terminal", "markdown", "latex", "typst", "csv", "json", "parquet", "html", "junit")
VERBS = ("fit", "validate", "test", "predict")


@pytest.mark.parametrize(
    "word, choices, right",
    [
        ("unifrom", DISTRIBUTIONS, "uniform"),
        ("Uniform", DISTRIBUTIONS, "uniform"),
        ("zip", DISTRIBUTIONS, "zipf"),
        ("cvs", FORMATS, "csv"),
        ("validation", VERBS, "validate"),
        ("evaluate", VERBS, "validate"),
        # other words, not misspelt ones
        ("normal", DISTRIBUTIONS, None),
        ("yaml", FORMATS, None),
        ("train", VERBS, None),
        ("", VERBS, None),
    ],
)
def test_only_a_near_word_is_proposed(word: str, choices: tuple[str, ...], right: str | None) -> None:
    expected = "" if right is None else f"; did you mean {right}?"
    assert did_you_mean(word, choices) == expected


@pytest.mark.parametrize("size, right", [("mediun", "medium"), ("2.7b", "2.7B"), ("huge", None), ("13b", None)])
def test_an_unknown_size_is_answered_with_a_similar_one(size: str, right: str | None):
    with pytest.raises(UsageError) as error:
        check_size_name(size)
    assert ("did you mean" in str(error.value)) == (right is not None)
    assert ("set d_model" in str(error.value)) == (right is None)
    if right is not None:
        assert str(error.value).endswith(f"did you mean {right}?")
