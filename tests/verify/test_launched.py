"""Verifying where a plan is launched: a fork decides for all ranks, and leaves the world as it is."""

import os
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from galvatron_lite.errors import LaunchError, VerificationError
from galvatron_lite.plans.schema import Plan
from galvatron_lite.verify.launched import Verifier, without_world
from galvatron_lite.verify.schema import Check, Verdict
from galvatron_lite.verify.source import ModelSource
from tests.equivalence.families import PlainModel
from tests.equivalence.plans import Strategy, write_plan
from tests.pool import WorkerPool

PLAN = write_plan([["before", "after"]], dict.fromkeys(("before", "after"), Strategy(data=2)), devices=2, batch=4)


def good(source: ModelSource, plan: Plan) -> Sequence[Check]:
    assert not dist.is_initialized()
    model, *_ = source.on_meta()
    assert all(parameter.is_meta for parameter in model.parameters())
    return [Check("a", Verdict.PASSED, f"{plan.devices}"), Check("b", Verdict.SKIPPED, "")]


def bad(_source: ModelSource, _plan: Plan) -> Sequence[Check]:
    return [Check("order", Verdict.FAILED, "Rank 1 waits."), Check("b", Verdict.PASSED, "")]


def broken(_source: ModelSource, _plan: Plan) -> Sequence[Check]:
    raise ValueError("no such thing")


def dies(_source: ModelSource, _plan: Plan) -> Sequence[Check]:
    os._exit(3)


def asked() -> list[str]:
    """On a rank of a world that was joined before: what each verification says; and the world still works."""
    told, model = [], PlainModel()
    for verify in (good, bad, broken, dies):
        verifier = Verifier(model, None, None, verify)
        try:
            verifier.check(PLAN)
            told.append("on")
        except (VerificationError, LaunchError) as error:
            told.append(str(error))
        total = torch.ones(1)
        dist.all_reduce(total)
        told.append(str(int(total)))
    assert not any(parameter.is_meta for parameter in model.parameters())
    return told


def test_all_ranks_go_on_or_raise_together(pool: WorkerPool) -> None:
    first, second = pool.run(2, asked)
    assert first == second
    on, a, failed, b, raised, c, died, d = first
    assert (on, a, b, c, d) == ("on", "2", "2", "2", "2")
    assert "order: Rank 1 waits." in failed
    assert "ValueError: no such thing" in raised
    assert "the process that does it ended" in died


def test_no_world_is_needed(capfd: pytest.CaptureFixture[str]) -> None:
    Verifier(PlainModel(), None, None, good).check(PLAN)
    assert "1 of 2 checks passed. b: skipped." in capfd.readouterr().err
    with pytest.raises(VerificationError) as caught:
        Verifier(PlainModel(), None, None, bad).check(PLAN)
    assert caught.value.failed == (("order", "Rank 1 waits."),)
    with without_world():
        assert not dist.is_initialized()
