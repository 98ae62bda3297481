"""Sampled plans that train like one process (``tests.equivalence``) pass every check: no false alarms."""

from __future__ import annotations

import pytest

from galvatron_lite.verify.schema import Verdict
from scripts.verify_sampled import verify
from tests.equivalence.test_plans import sampled


@pytest.mark.parametrize(("family", "seed"), [("plain", 0), ("plain", 2), ("plain", 4), ("zoo-llama", 1)])
def test_right_plans_pass(family: str, seed: int) -> None:
    """Unlike layouts side by side, stages that go round, parameters outside of layers."""
    (plan,) = sampled(family, 2, 1, seed)
    found = verify(family, plan)
    assert len(found) > 8
    assert [check for check in found if check.verdict is Verdict.FAILED] == []
