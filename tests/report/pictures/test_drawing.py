"""The colours hold for colour-blind readers, on white and on dark."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from lm_profiler.record.quantities import PARTS
from lm_profiler.report.pictures.drawing import PART_COLOURS, SERIES_COLOURS

# Machado, Oliveira & Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency", IEEE TVCG
# 15(6), 2009, table of severity 1.0; for linear RGB.
SIGHTS = {
    "normal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
# sRGB to CIE XYZ and its white, IEC 61966-2-1.
XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]])
WHITE = XYZ.sum(axis=1)


def linear(colour: str) -> NDArray[np.float64]:
    c = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(rgb: NDArray[np.float64]) -> NDArray[np.float64]:
    t = XYZ @ rgb / WHITE
    f = np.where(t > (6 / 29) ** 3, np.cbrt(t), t * (29 / 6) ** 2 / 3 + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def difference(one: str, other: str, sight: str) -> float:
    """CIE 1976 colour difference; about 2.3 is just noticeable side by side."""
    matrix = np.array(SIGHTS[sight])
    seen = [lab(np.clip(matrix @ linear(colour), 0, 1)) for colour in (one, other)]
    return float(np.linalg.norm(seen[0] - seen[1]))


def contrast(one: str, other: str) -> float:
    """WCAG 2's contrast ratio."""
    low, high = sorted(float(XYZ[1] @ linear(colour)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def test_colour_measures_have_known_extremes() -> None:
    assert contrast("#FFFFFF", "#000000") == pytest.approx(21)
    assert difference("#FFFFFF", "#000000", "normal") == pytest.approx(100, abs=0.01)
    assert difference("#FF0000", "#6B6B00", "protanopia") < 20 < difference("#FF0000", "#6B6B00", "normal")
    assert not set(SERIES_COLOURS) & set(PART_COLOURS.values())


@pytest.mark.parametrize("sight", SIGHTS)
def test_parts_that_touch_in_a_stack_have_distinct_colours(sight: str) -> None:
    assert tuple(PART_COLOURS) == PARTS
    for above, below in pairwise(PARTS):
        assert difference(PART_COLOURS[above], PART_COLOURS[below], sight) > 20, (above, below)
    # The others are often too thin to be seen, and then these touch.
    for part, other in combinations(("data", "forward", "backward", "optimizer", "other"), 2):
        assert difference(PART_COLOURS[part], PART_COLOURS[other], sight) > 15, (part, other)
    for part, other in combinations(PARTS, 2):
        assert difference(PART_COLOURS[part], PART_COLOURS[other], sight) > 8, (part, other)


@pytest.mark.parametrize("page", ["#FFFFFF", "#1E1E1E", "#303030"], ids=["white", "dark", "TensorBoard's dark"])
def test_colours_stand_out_from_the_page(page: str) -> None:
    for colour in (*PART_COLOURS.values(), *SERIES_COLOURS):
        assert contrast(colour, page) > 2, colour
