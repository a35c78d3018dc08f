"""What selftests have shown of a machine is kept for it, and for no other."""

import json
from pathlib import Path

import numpy as np
import pytest
from compared import ENVIRONMENT

from lm_profiler.record.process_spread import ASSUMED_SPREAD, ProcessSpread, known_spread, save_spread, spread_of

OTHER = ENVIRONMENT.model_copy(update={"device_name": "NVIDIA L4"})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "lm_profiler"


def test_the_spread_is_the_deviation_of_logarithms() -> None:
    means = [0.1, 0.103, 0.099, 0.104, 0.1]
    found = spread_of(means)
    assert (found.std, found.freedom) == (pytest.approx(np.std(np.log(means), ddof=1)), 4)
    assert spread_of(means[:1]) is None
    assert spread_of([0.1, 0.0]) is None


def test_a_spread_that_cannot_be_written_is_returned_but_not_known_later(cache: Path) -> None:
    cache.touch()  # a file, where a folder is to be
    assert save_spread(ENVIRONMENT, ProcessSpread(std=0.02, freedom=4)).std == pytest.approx(0.02)
    assert known_spread(ENVIRONMENT) == ASSUMED_SPREAD


def test_a_known_spread_is_at_least_half_a_percent() -> None:
    save_spread(ENVIRONMENT, ProcessSpread(std=0.0001, freedom=4))
    assert known_spread(ENVIRONMENT).std == 0.005


def test_a_spread_is_known_of_its_machine_alone() -> None:
    assert known_spread(ENVIRONMENT) == known_spread(None) == ASSUMED_SPREAD
    saved = save_spread(ENVIRONMENT, ProcessSpread(std=0.02, freedom=4))
    assert saved == known_spread(ENVIRONMENT) == ProcessSpread(pytest.approx(0.02), freedom=4)
    assert known_spread(OTHER) == ASSUMED_SPREAD


def test_two_selftests_of_a_machine_are_pooled() -> None:
    save_spread(ENVIRONMENT, ProcessSpread(std=0.04, freedom=4))
    pooled = save_spread(ENVIRONMENT, ProcessSpread(std=0.02, freedom=4))
    assert pooled.std**2 == pytest.approx((0.04**2 + 0.02**2) / 2)
    assert pooled.freedom == 4 + 4


def test_earlier_selftests_of_a_machine_count_less() -> None:
    """At most 20 degrees of freedom are kept, so that the first is forgotten."""
    save_spread(ENVIRONMENT, ProcessSpread(std=0.04, freedom=4))
    for _ in range(30):
        latest = save_spread(ENVIRONMENT, ProcessSpread(std=0.01, freedom=4))
    assert latest == ProcessSpread(pytest.approx(0.01, rel=0.05), freedom=20)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"std": -1, "freedom": 4}', '{"std": "x", "freedom": 4}', '{"std": NaN, "freedom": 0}']
)
def test_a_damaged_file_is_as_none(text: str, cache: Path) -> None:
    save_spread(ENVIRONMENT, ProcessSpread(std=0.02, freedom=4))
    (file,) = cache.iterdir()
    assert json.loads(file.read_text()) == {"std": 0.02, "freedom": 4}
    file.write_text(text)
    assert known_spread(ENVIRONMENT) == ASSUMED_SPREAD
