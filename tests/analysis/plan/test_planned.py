"""The rule that says whether a run fits."""

from __future__ import annotations

import pytest

from lm_profiler.analysis.plan.planned import Planned, fits
from lm_profiler.record.run import MemoryCauses


@pytest.mark.parametrize("has, known", [(1000, True), (999, None), (900, None), (899, False)])
def test_between_nine_tenths_and_all_nobody_can_tell(has: int, known: bool | None) -> None:
    assert fits(Planned({"forward": 900, "optimizer": 800}, {}), has) is known


@pytest.mark.parametrize("has, known", [(1101, True), (1099, None), (900, None), (899, False)])
def test_what_is_reserved_has_to_be_there_for_a_run_to_fit_surely(has: int, known: bool | None) -> None:
    assert fits(Planned({"forward": 900}, {}, reserved=1100), has) is known


@pytest.mark.parametrize("has, known", [(1000, True), (899, None), (400, None), (399, False)])
def test_a_compiled_run_may_do_with_fewer_activations(has: int, known: bool | None) -> None:
    known_causes = {"parameters": 400, "gradients": 0, "optimizer_states": 0, "buffers": 0}
    causes = {"forward": MemoryCauses(**known_causes, activations_and_rest=500)}
    assert fits(Planned({"forward": 900}, causes, compiled=True), has) is known
